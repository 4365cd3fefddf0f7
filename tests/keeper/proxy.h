#pragma once

// A network between two keepers that does what a test wants to what the second one sends.
//
//   Proxy proxy(address_of_holder);
//   proxy.close_at = 1000;                  // of the bytes from the holder
//   client.pull(proxy.address(), ...);

#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/event_fd.h"
#include "libddp/keeper/replica_wire.h"
#include "libddp/transport/tcp_socket.h"

namespace libddp::test {

class Proxy {
 public:
  static constexpr std::uint64_t kNever = ~0ull;

  explicit Proxy(const std::string& to)
      : to_(parse_endpoint(to)),
        listener_(TcpListener::open("127.0.0.1")),
        thread_([this] { run(); }) {}
  ~Proxy() {
    stop_.set();
    thread_.join();
  }

  std::string address() const { return listener_.endpoint().to_string(); }

  /// Of the bytes that the holder sends on a connection: there the connection ends, a bit flips, or
  /// nothing comes any more.
  std::atomic<std::uint64_t> close_at{kNever};
  std::atomic<std::uint64_t> flip_at{kNever};
  std::atomic<std::uint64_t> freeze_at{kNever};
  /// At a time, with a pause behind each; 0 = all.
  std::atomic<std::size_t> piece_bytes{0};
  /// Of the last connection.
  std::atomic<std::uint64_t> num_bytes{0};
  std::atomic<int> num_connections{0};

 private:
  bool is_stopped() {
    pollfd entry{stop_.fd(), POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }

  void run() {
    while (!is_stopped()) {
      UniqueFd puller = listener_.accept();
      if (!puller) {
        ::poll(nullptr, 0, 1);
        continue;
      }
      ++num_connections;
      num_bytes = 0;
      const UniqueFd holder = connect_tcp(to_, Deadline::after(std::chrono::seconds(10)));
      while (!is_stopped() && forward(puller.get(), holder.get())) {
      }
    }
  }

  /// False when the connection is over.
  bool forward(int puller, int holder) {
    pollfd entries[] = {{puller, POLLIN, 0}, {holder, POLLIN, 0}};
    if (num_bytes >= freeze_at) entries[1].events = 0;
    ::poll(entries, 2, 10);
    std::vector<char> bytes(64u << 10);
    if (entries[0].revents != 0) {
      const ssize_t got = ::recv(puller, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
      if (got > 0) send(holder, bytes.data(), static_cast<std::size_t>(got));
    }
    if (entries[1].revents == 0 || entries[1].events == 0) return true;
    const std::size_t most = piece_bytes == 0 ? bytes.size() : piece_bytes.load();
    const std::uint64_t end = std::min({close_at.load(), freeze_at.load(), num_bytes + most});
    const ssize_t got = ::recv(holder, bytes.data(), end - num_bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return false;
    if (got < 0) return true;
    const std::uint64_t next = num_bytes + static_cast<std::uint64_t>(got);
    if (flip_at >= num_bytes && flip_at < next) bytes[flip_at - num_bytes] ^= 8;
    num_bytes = next;  // before the far end can have them, and the test look
    send(puller, bytes.data(), static_cast<std::size_t>(got));
    if (piece_bytes != 0) ::poll(nullptr, 0, 1);
    return num_bytes < close_at;
  }

  static void send(int socket, const char* data, std::size_t bytes) {
    try {
      send_bytes(socket, data, bytes, Deadline::after(std::chrono::seconds(10)));
    } catch (const std::exception&) {
      // The far end has given up; the next read sees it.
    }
  }

  const TcpEndpoint to_;
  TcpListener listener_;
  EventFd stop_ = EventFd::create();
  std::thread thread_;
};

}  // namespace libddp::test
