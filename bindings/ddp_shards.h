#pragma once

// Methods of libddp._C.ReplicatedModel for optimizers that share the work, and their classes.
// Thread rule: called once, when the module is made.
//
//   ReplicatedModelClass replica(module, "ReplicatedModel");
//   bind_ddp_shards(module, replica);

#include <torch/csrc/utils/pybind.h>

#include "bindings/ddp_timeline.h"

namespace libddp {

void bind_ddp_shards(pybind11::module_& module, ReplicatedModelClass& replica);

}  // namespace libddp
