#pragma once

// What an exception says, short enough to be told to other ranks. Thread rule: pure function.
//
//   group->report_error("in forward: " + first_line_of(std::current_exception()));

#include <exception>
#include <string>

namespace libddp {

/// The first line of an exception's message, cut where it is very long.
std::string first_line_of(const std::exception_ptr& error);

}  // namespace libddp
