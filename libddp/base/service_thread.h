#pragma once

// Starts a thread of the library: named, and deaf to signals, so that the program's own threads
// keep receiving Ctrl-C and SIGTERM. Thread rule: any thread.
//
//   std::thread worker = start_service_thread("libddp-queue", [] {
//     give_way();  // to the training
//     ...
//   });

#include <functional>
#include <string>
#include <thread>

namespace libddp {

/// `name` is cut to 15 characters.
std::thread start_service_thread(const std::string& name, std::function<void()> body);

/// From now on the calling thread, and what it starts, gets the time of cores that others leave:
/// nice 19. Sessions that the kernel groups (autogroup) share out a core among themselves first.
void give_way() noexcept;

}  // namespace libddp
