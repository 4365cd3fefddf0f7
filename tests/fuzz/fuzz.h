#pragma once

// What the fuzz targets share: sockets that one side fills, and input cut into pieces.
// Thread rule: one thread.
//
//   Bytes input(data, size);
//   const Pair pair = Pair::make();
//   pair.send(input.piece());

#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "libddp/base/log.h"
#include "libddp/base/unique_fd.h"

namespace libddp::fuzz {

/// Ends the program, which is what the fuzzer reports.
inline void require(bool holds) {
  if (!holds) std::abort();
}

/// An input: numbers and pieces are taken from its front.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size)
      : at_(reinterpret_cast<const char*>(data)), left_(size) {}

  bool is_empty() const { return left_ == 0; }
  std::string rest() { return take(left_); }
  /// One byte says how long it is.
  std::string piece() {
    if (left_ == 0) return {};
    const auto size = static_cast<std::size_t>(static_cast<unsigned char>(take(1)[0]));
    return take(size);
  }

 private:
  std::string take(std::size_t size) {
    size = std::min(size, left_);
    std::string text(at_, size);
    at_ += size;
    left_ -= size;
    return text;
  }

  const char* at_;
  std::size_t left_;
};

/// Two ends of a stream.
struct Pair {
  UniqueFd ours;
  UniqueFd theirs;

  static Pair make() {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    Pair pair;
    pair.ours = UniqueFd(ends[0]);
    pair.theirs = UniqueFd(ends[1]);
    return pair;
  }
  /// The other side says `text`; false if that does not fit.
  bool send(const std::string& text) const {
    return ::send(theirs.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(text.size());
  }
  void end() const { ::shutdown(theirs.get(), SHUT_WR); }
};

inline const bool kIsQuiet = [] {
  set_log_level(LogLevel::Off);
  return true;
}();

}  // namespace libddp::fuzz
