#pragma once

// What a process of a reconfigurable group tells others about how to meet it: the text that
// torch.distributed._get_reconfigure_handle() answers.
//
// Every such process has a small store of its own, whose address stands here; those who meet agree
// on one of them (reconfigure_plan.h). The text says nothing secret: who has the run key is
// believed (docs/security.md), with it or without. It is versioned, at most kMaxBytes long, and
// what comes from others is checked in every field before any of it is used. Thread rule: values.
//
//   std::string text = handle.encode();
//   MemberHandle theirs = MemberHandle::decode(text);     // ArgumentError if it is none

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace libddp {

struct MemberHandle {
  static constexpr std::size_t kMaxBytes = 2048;

  /// Random, drawn once per group and process.
  std::string instance;
  /// Numeric.
  std::string address;
  std::uint16_t port = 0;
  pid_t pid = 0;
  /// When the process began, as the kernel counts; empty where it does not say.
  std::string begun;
  std::string host;
  /// Equal for processes that share a host.
  std::string host_key;
  /// In which `pid` means something: of one machine and one namespace. Empty where that is not
  /// known.
  std::string pid_place;

  /// Of this process, which listens there. `host_identity`: see ProcessGroup::Options.
  static MemberHandle own(std::string address, std::uint16_t port,
                          const std::string& host_identity);

  std::string encode() const;
  static MemberHandle decode(const std::string& text);

  /// "pid 4711 on alpha".
  std::string who() const;
};

}  // namespace libddp
