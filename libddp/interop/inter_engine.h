#pragma once

// Any c10d backend between the hosts of a group, in place of libddp's TCP links (docs/hosts.md).
// Thread rule: free function; the engine's function is called by the thread that makes the group.
//
//   const libddp::InterEngine ucc = libddp::inter_engine(
//       [](const libddp::InterEngineOptions& given) { return make_ucc(given.store, given.rank); });
//   libddp::Group group = libddp::init_process_group({.inter = ucc});

#include <chrono>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/process_group.h"

namespace libddp {

/// What a c10d backend joins the others of its number with.
struct InterEngineOptions {
  /// For this engine's keys alone.
  c10::intrusive_ptr<c10d::Store> store;
  /// Number of this host, and of hosts.
  int rank = 0;
  int world_size = 1;
  /// This host's address on the network between the hosts.
  std::string address;
  std::chrono::milliseconds timeout{};
};

/// `make` is called in each group of several hosts, at its creation, on every rank that carries
/// bytes between hosts. Those of one number on all hosts join one backend.
using InterBackendMaker =
    std::function<c10::intrusive_ptr<c10d::Backend>(const InterEngineOptions& options)>;
InterEngine inter_engine(InterBackendMaker make);

}  // namespace libddp
