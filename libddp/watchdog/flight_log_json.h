#pragma once

// A group's flight recorder as JSON; docs/failures.md lists the fields. Any thread, any time.
//
//   std::string text = flight_log_json(recorder, {.name = "world", ...}, "");

#include <string>

#include "libddp/base/group_identity.h"
#include "libddp/watchdog/flight_recorder.h"

namespace libddp {

/// `{"group": "world", "rank": 0, ..., "operations": [{"number": 1, ...}]}`; `failure` may be
/// empty.
std::string flight_log_json(const FlightRecorder& recorder, const GroupIdentity& group,
                            const std::string& failure);

/// Text as a JSON string, quotes included; bytes that are no ASCII are replaced.
std::string json_string(const std::string& text);

}  // namespace libddp
