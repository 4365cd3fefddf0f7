#pragma once

// The members of libddp._C.ReplicatedModel that tell what it does: layout of the buckets, times of
// passes. Thread rule: called once, at import.

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "libddp/ddp/replicated_model.h"

namespace libddp {

using ReplicatedModelClass = pybind11::class_<ReplicatedModel, std::shared_ptr<ReplicatedModel>>;

void bind_ddp_timeline(ReplicatedModelClass& replica);

}  // namespace libddp
