#include "libddp/rendezvous/store_opening.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/blocking_calls.h"
#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/log.h"
#include "libddp/base/system_error.h"
#include "libddp/rendezvous/reachability.h"
#include "libddp/rendezvous/rendezvous_file.h"
#include "libddp/rendezvous/torch_store.h"
#include "libddp/transport/own_address.h"
#include "libddp/transport/short_lookups.h"

namespace libddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

[[noreturn]] void refuse_port(const std::string& host, std::uint16_t port,
                              const std::exception& error) {
  const std::string text = torch_error_text(error);
  if (text.find("EADDRINUSE") != std::string::npos) {
    throw NetworkError(fmt::format(
        "libddp: rank 0 cannot listen on port {} for the store at {}:{}: address already in use. "
        "Hint: another job, or a second rank 0, uses this port; choose another MASTER_PORT (or "
        "port in the init_method) on all ranks.",
        port, host, port));
  }
  throw NetworkError(fmt::format(
      "libddp: rank 0 cannot open the store at {}:{}: {}. Hint: MASTER_ADDR must be an address of "
      "the machine of rank 0, and MASTER_PORT a port that it may use.",
      host, port, text));
}

/// A socket at the address of `host` only, for the server to listen on; -1 = torch's own, on all
/// interfaces.
int listen_socket(const std::string& host, std::uint16_t port, Deadline deadline) {
  OwnAddress own = bind_own_address(host, port, deadline);
  if (!own.reason.empty()) {
    log(LogLevel::Info, "store_on_all_interfaces", {{"host", host}, {"reason", own.reason}});
  }
  // Without a reason the port is taken: by this process's own store, which torch finds and shares,
  // or by another, which torch tells.
  return own.socket.release();
}

/// Whether the address of `host` is known without a name server.
bool is_known(const std::string& host) {
  in6_addr address{};
  return host == "localhost" || ::inet_pton(AF_INET, host.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

/// In a thread of its own.
StorePtr make_tcp_store(const std::string& host, c10d::TCPStoreOptions options, Deadline deadline) {
  if (is_known(host)) shorten_lookups();
  const int socket = options.isServer ? listen_socket(host, options.port, deadline) : -1;
  if (socket >= 0) options.masterListenFd = socket;
  auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
  int is_listening = 0;
  socklen_t size = sizeof(is_listening);
  // It is not where torch shares a server that this process has at the same port.
  if (socket >= 0 && ::getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size) == 0 &&
      !is_listening) {
    ::close(socket);
  }
  return store;
}

}  // namespace

StorePtr open_tcp_store(const std::string& host, std::uint16_t port, StoreRole role, int rank,
                        std::chrono::milliseconds timeout, const std::function<void()>& look) {
  const Deadline deadline = Deadline::after(timeout);
  if (role == StoreRole::Client) wait_until_reachable(host, port, rank, timeout);
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = role == StoreRole::Server;
  options.waitWorkers = false;
  options.timeout = timeout;
  // A second group of this process at the same address shares the server.
  options.multiTenant = true;
  std::optional<StorePtr> store;
  try {
    store = BlockingCalls("libddp-store")
                .run<StorePtr>(
                    [host, options, deadline] { return make_tcp_store(host, options, deadline); },
                    deadline, look);
  } catch (const c10::Error& error) {
    if (role == StoreRole::Server) refuse_port(host, port, error);
    throw NetworkError(fmt::format(
        "libddp: rank {} lost the store at {}:{} while connecting: {}. Hint: look at the output of "
        "rank 0 (or the launcher), which holds it.",
        rank, host, port, torch_error_text(error)));
  }
  if (!store) {
    throw TimeoutError(fmt::format(
        "libddp: rank {}: what listens at {}:{} does not answer as a store within {:.1f} s. Hint: "
        "another program may use this port, or MASTER_ADDR may not be the machine of rank 0; "
        "choose another MASTER_PORT on all ranks.",
        rank, host, port, std::chrono::duration<double>(timeout).count()));
  }
  return *std::move(store);
}

StorePtr open_file_store(const std::string& path, int world_size,
                         std::chrono::milliseconds timeout) {
  const std::string folder = folder_of(path);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw ArgumentError(fmt::format(
        "libddp: init_method file://{}: cannot write in folder {}: {}. Hint: give a path in a "
        "folder that exists and that all ranks share.",
        path, folder, errno_text("access", errno)));
  }
  try {
    auto store = c10::make_intrusive<RendezvousFile>(path, world_size);
    store->setTimeout(timeout);
    return store;
  } catch (const std::exception& error) {
    throw StoreError(
        fmt::format("libddp: init_method file://{}: cannot open the store: {}. Hint: the path must "
                    "be a plain file that all ranks can write, fresh for every run.",
                    path, torch_error_text(error)));
  }
}

}  // namespace libddp
