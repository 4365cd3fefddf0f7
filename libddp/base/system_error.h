#pragma once

// The text of errno for messages: "memfd_create: Too many open files (errno 24)".
// Thread rule: any thread.
//
//   throw NetworkError(fmt::format("libddp: {}", errno_text("connect", errno)));

#include <string>
#include <string_view>

namespace libddp {

/// "<call>: <description> (errno <number>)".
std::string errno_text(std::string_view call, int error);

}  // namespace libddp
