#include "libddp/watchdog/flight_log_json.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>

#include "libddp/base/monotonic_clock.h"
#include "libddp/base/process.h"

namespace libddp {
namespace {

std::string shape_json(const OpDescription& operation) {
  std::string text = "[";
  const int kept = std::min<int>(operation.num_dims, OpDescription::kMaxDims);
  for (int i = 0; i < kept; ++i) {
    text += fmt::format("{}{}", i > 0 ? ", " : "", operation.shape[i]);
  }
  return text + "]";
}

std::string record_json(const FlightRecorder::Record& record) {
  const OpDescription& operation = record.operation;
  const std::string call = operation.to_string(record.sequence);
  const std::string label(operation.label, strnlen(operation.label, sizeof(operation.label)));
  return fmt::format(
      R"({{"number": {}, "sequence": {}, "kind": {}, "call": {}, "label": {}, "dtype": {}, )"
      R"("count": {}, "shape": {}, "reduce_op": {}, "root": {}, "device": {}, "state": {}, )"
      R"("called_ns": {}, "started_ns": {}, "finished_ns": {}, "device_ns": {}}})",
      record.number, record.sequence, json_string(call.substr(0, call.find(' '))),
      json_string(call), json_string(label), json_string(std::string(name(operation.dtype))),
      operation.count, shape_json(operation), json_string(std::string(name(operation.reduce_op))),
      operation.root, json_string(operation.is_on_device ? "accelerator" : "cpu"),
      json_string(name(record.state)), record.called_ns, record.started_ns, record.finished_ns,
      record.device_ns);
}

// The anchor that turns the other times into those of a clock on the wall.
std::int64_t wall_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

std::string json_string(const std::string& text) {
  std::string result = "\"";
  for (const char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      result += '\\';
      result += character;
    } else if (code < 0x20) {
      result += fmt::format("\\u{:04x}", code);
    } else {
      result += code < 0x7f ? character : '?';
    }
  }
  return result + '"';
}

std::string flight_log_json(const FlightRecorder& recorder, const GroupIdentity& group,
                            const std::string& failure) {
  std::string text = fmt::format(
      R"({{"version": 1, "group": {}, "rank": {}, "world_size": {}, "pid": {}, "host": {}, )"
      R"("wall_time_ns": {}, "monotonic_ns": {}, "failure": {}, "operations_total": {}, )"
      R"("operations": [)",
      json_string(group.name), group.rank, group.world_size, ::getpid(), json_string(host_name()),
      wall_ns(), monotonic_ns(), failure.empty() ? "null" : json_string(failure),
      recorder.num_added());
  const char* separator = "\n";
  for (const FlightRecorder::Record& record : recorder.records()) {
    text += separator + record_json(record);
    separator = ",\n";
  }
  return text + "]}";
}

}  // namespace libddp
