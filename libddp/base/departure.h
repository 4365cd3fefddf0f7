#pragma once

// Ends every wait of this process, because it must leave its groups: the launcher of
// `libddp run --in-place` asks for it. Waits look between their pieces (interrupt.h), as they look
// for Ctrl-C, and throw PeerError with the reason. Thread rule: any thread.
//
//   ask_to_depart("a host comes");
//   throw_if_departing();      // PeerError, until
//   withdraw_departure();

#include <string>

namespace libddp {

void ask_to_depart(const std::string& reason);
void withdraw_departure();
bool is_departing();
/// Costs one load where nobody asks.
void throw_if_departing();

}  // namespace libddp
