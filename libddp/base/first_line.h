#pragma once

// What an exception says, short enough to be told to other ranks.
// Thread rule: first_line_of from any thread; describe_errors_by once, before threads ask.
//
//   group->report_error("in forward: " + first_line_of(std::current_exception()));

#include <exception>
#include <string>

namespace libddp {

/// The first line of an exception's message, cut where it is very long; in a language binding, what
/// `describe_errors_by` makes of it.
std::string first_line_of(const std::exception_ptr& error);

/// A language binding's words for exceptions; empty where it has none.
using ErrorDescriber = std::string (*)(const std::exception_ptr& error);
void describe_errors_by(ErrorDescriber describer);

}  // namespace libddp
