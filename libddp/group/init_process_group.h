#pragma once

// From a user's environment and arguments to a group: rendezvous, then ProcessGroup::create.
// Thread rule: blocking; one call at a time.
//
//   libddp::Group group = libddp::init_process_group({.init_method = "tcp://10.0.0.7:29500",
//                                                     .rank = 0, .world_size = 2});

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/process_group.h"

namespace libddp {

struct InitOptions {
  /// "auto", "libddp", or torch's "gloo", also as "cpu:gloo,cuda:nccl": all mean the same. "nccl"
  /// is an error where there is no CUDA device; others are refused.
  std::string backend = "auto";
  /// This and the next three: see RendezvousOptions.
  std::string init_method = "env://";
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::string group_name = "world";
  /// See ProcessGroup::Options.
  bool require_key = false;
  /// Used instead of init_method when set; rank and world_size are then required.
  c10::intrusive_ptr<c10d::Store> store{};
  InterEngine inter{};
  LinkOptions links{};
};

/// Throws ArgumentError, NetworkError, TimeoutError.
Group init_process_group(const InitOptions& options = {});

}  // namespace libddp
