#pragma once

// Text of others (peers, a store that strangers can write to) as it may stand in messages and logs:
// nothing in it can move a terminal's cursor, begin a line of its own, or fail to be UTF-8.
// Thread rule: free functions; any thread.
//
//   fmt::format("the store holds '{}'", printable(text));     // "\x1b[2J" comes out as \x1b[2J

#include <string>
#include <string_view>

namespace libddp {

/// Control characters (C0, DEL, C1) and bytes that are no UTF-8 as \n, \t or \xNN; the rest as it
/// is.
std::string printable(std::string_view text);

/// The same, but line ends and tabs stay: for texts of several lines from ranks of the run.
std::string printable_lines(std::string_view text);

}  // namespace libddp
