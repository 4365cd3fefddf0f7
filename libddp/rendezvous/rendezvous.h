#pragma once

// From a user's environment and arguments to a group: who am I, where is the store.
//
// Sources: explicit store + rank + world_size; "env://" (RANK, WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT, under torchrun the agent's store); "tcp://host:port"; "file:///path". What is
// missing or contradictory is an ArgumentError that names the variable and its value.
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
  /// "auto", "libddp", or torch's "gloo", also as "cpu:gloo,cuda:nccl". Others are refused.
  std::string backend = "auto";
  std::string init_method = "env://";
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::string group_name = "world";
  /// Ranks on several hosts without a run key (docs/security.md) are an error; without this, and
  /// without LIBDDP_REQUIRE_KEY=1, they start with a warning.
  bool require_key = false;
  /// Used instead of init_method when set; rank and world_size are then required.
  c10::intrusive_ptr<c10d::Store> store{};
  /// See ProcessGroup::Options.
  InterEngine inter{};
  LinkOptions links{};
};

/// What a rendezvous found.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
};

/// Finds the store and this process's place. Throws ArgumentError, NetworkError, TimeoutError.
Rendezvous rendezvous(const InitOptions& options);

/// rendezvous + ProcessGroup::create.
Group init_process_group(const InitOptions& options = {});

}  // namespace libddp
