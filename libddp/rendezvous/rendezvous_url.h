#pragma once

// The parts of an init_method such as tcp://10.0.0.7:29500?rank=0&world_size=2 or
// file:///shared/path?rank=0. Only text: nothing is looked up or opened.
// Thread rule: free function; any thread.
//
//   RendezvousUrl url = RendezvousUrl::parse("tcp://[::1]:29500?rank=0");
//   url.host;    // "::1"
//   url.rank;    // 0

#include <cstdint>
#include <optional>
#include <string>

namespace libddp {

struct RendezvousUrl {
  bool is_tcp = false;
  /// tcp://
  std::string host;
  std::uint16_t port = 0;
  /// file://
  std::string path;
  /// As the query says them; their sense is not checked here.
  std::optional<long> rank;
  std::optional<long> world_size;

  /// Throws ArgumentError that names `text` and what is wrong with it.
  static RendezvousUrl parse(const std::string& text);
  /// The ArgumentError about `text`.
  [[noreturn]] static void refuse(const std::string& text, const std::string& problem);
};

}  // namespace libddp
