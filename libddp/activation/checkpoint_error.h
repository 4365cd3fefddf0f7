#pragma once

// The recomputation of a block went wrong. Thread rule: a value, freely copied.
//
//   libddp checkpoint of Block h.3: input 0 was changed in place between forward and backward ...
//
// Python sees torch.utils.checkpoint.CheckpointError.

#include "libddp/base/error.h"

namespace libddp {

class CheckpointError : public StateError {
 public:
  using StateError::StateError;
};

}  // namespace libddp
