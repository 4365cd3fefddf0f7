#pragma once

// From a user's environment and arguments to a store and this process's place in the group.
//
// Sources: explicit store + rank + world_size; "env://" (RANK, WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT, under torchrun the agent's store); "tcp://host:port"; "file:///path". What is
// missing or contradictory is an ArgumentError that names the variable and its value.
// Thread rule: blocking; one call at a time.
//
//   const libddp::Rendezvous found = libddp::rendezvous({.init_method = "tcp://10.0.0.7:29500",
//                                                        .rank = 0, .world_size = 2});
//   found.store;   // a c10d::Store that all ranks share

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace libddp {

struct RendezvousOptions {
  std::string init_method = "env://";
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Used instead of init_method when set; rank and world_size are then required.
  c10::intrusive_ptr<c10d::Store> store{};
};

/// Which store a rank has found at which address: see `remember`.
struct StoreVisit {
  /// Address and rank; empty = no store that ends with rank 0.
  std::string place;
  /// What rank 0 called it; empty = nothing.
  std::string name;
};

/// What a rendezvous found.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  StoreVisit visit{};
};

/// Finds the store and this process's place. Throws ArgumentError, NetworkError, TimeoutError.
Rendezvous rendezvous(const RendezvousOptions& options);

/// To be called when the group of a rendezvous has been made: if this rank leaves it and comes back
/// to that address before rank 0, the next rendezvous waits for the store of the next group.
void remember(const StoreVisit& visit);

}  // namespace libddp
