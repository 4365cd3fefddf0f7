#pragma once

// One call of a user on a group, and the device of its tensors, which all of them share: it decides
// which backend moves them.
// Thread rule: belongs to one call.
//
//   OperationSite site = state.enter("all_reduce");
//   Operand operand = make_operand(site, "tensor", tensor, Access::ReadWrite);
//   Backend& backend = state.backend_for(site);

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>

#include "libddp/base/group_identity.h"

namespace libddp {

struct OperationSite : CallSite {
  /// Of the first tensor that was looked at; without one the call has none.
  std::optional<c10::Device> device{};
  /// "argument tensor float32 [2]": that tensor, for messages.
  std::string first_argument() const;
  const char* argument = "";
  const at::Tensor* tensor = nullptr;
};

}  // namespace libddp
