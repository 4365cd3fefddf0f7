#pragma once

// Gloo, as torch brings it, for C++ programs: torch's wheels carry no headers of Gloo.
// Thread rule: blocking; any thread.
//
//   libddp::Group group = libddp::init_process_group({.inter = libddp::gloo_engine()});

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/group/process_group.h"

namespace libddp {

/// Joins a group of Gloo's over `store`, whose keys are its own; blocks until all ranks have come.
/// `address`: of the interface that it listens on.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size, const std::string& address,
                                            std::chrono::milliseconds timeout);

/// A copy of options that are Gloo's, else the same.
c10::intrusive_ptr<c10d::Backend::Options> copy_of_gloo_options(
    c10::intrusive_ptr<c10d::Backend::Options> options);

/// Lets Gloo move collectives between hosts, on the addresses that libddp chose.
InterEngine gloo_engine();

}  // namespace libddp
