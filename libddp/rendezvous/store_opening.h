#pragma once

// Opens the stores of a rendezvous: TCPStore and FileStore, with errors that say what to do.
//
// torch's TCPStore client has three habits that this hides: it logs stack traces while nobody
// listens (so we wait for a listener first), it waits without end for one that never answers (so it
// is made in a thread of its own, with a deadline), and it looks up the name of the address that it
// has connected to (so that thread's lookups are short, unless the host's address must be looked
// up).
// Thread rule: blocking; lets interrupts through.
//
//   auto store = open_tcp_store("10.0.0.7", 29500, StoreRole::Client, 3, std::chrono::minutes(5));

#include <chrono>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace libddp {

enum class StoreRole { Server, Client };

/// A server listens at the address of `host` only; on all interfaces, as torch's own, where that is
/// no single address of this host (the log says so).
/// `look`: called ten times a second once somebody listens; what it throws ends the wait.
/// Errors: NetworkError (the port is in use), TimeoutError (nobody listens or answers).
c10::intrusive_ptr<c10d::Store> open_tcp_store(const std::string& host, std::uint16_t port,
                                               StoreRole role, int rank,
                                               std::chrono::milliseconds timeout,
                                               const std::function<void()>& look = {});

/// Errors: ArgumentError (the folder does not exist or cannot be written), StoreError.
c10::intrusive_ptr<c10d::Store> open_file_store(const std::string& path, int world_size,
                                                std::chrono::milliseconds timeout);

}  // namespace libddp
