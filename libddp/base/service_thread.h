#pragma once

// Starts a thread of the library: named, and deaf to signals, so that the program's own threads
// keep receiving Ctrl-C and SIGTERM. Thread rule: any thread.
//
//   std::thread worker = start_service_thread("libddp-queue", [] { ... });

#include <functional>
#include <string>
#include <thread>

namespace libddp {

/// `name` is cut to 15 characters.
std::thread start_service_thread(const std::string& name, std::function<void()> body);

}  // namespace libddp
