#pragma once

// The members of libddp._C.Replica that tell what it does: layout of the buckets, times of passes.
// Thread rule: called once, at import.

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "libddp/ddp/replica.h"

namespace libddp {

using ReplicaClass = pybind11::class_<Replica, std::shared_ptr<Replica>>;

void bind_ddp_timeline(ReplicaClass& replica);

}  // namespace libddp
