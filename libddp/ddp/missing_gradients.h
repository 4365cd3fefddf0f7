#pragma once

// Which parameters each rank has no gradient for, told in a message of its own: bits on the host,
// beside what the device does. Telling does not wait; hearing does, and may come a step later.
// Thread rule: as Reducer; collective order: the order of `tell`.
//
//   MissingGradients missing(group);
//   missing.tell(is_missing);                  // one byte for each parameter
//   if (missing.is_told()) flags = missing.hear();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "libddp/group/process_group.h"

namespace libddp {

class MissingGradients {
 public:
  explicit MissingGradients(Group group) : group_(std::move(group)) {}

  void tell(const std::vector<std::uint8_t>& is_missing);
  /// A message has not been heard.
  bool is_told() const { return work_ != nullptr; }
  /// REQUIRES is_told. [world_size * parameters], rank by rank: 1 where it is missing.
  std::vector<std::uint8_t> hear();

 private:
  const Group group_;
  std::size_t num_parameters_ = 0;
  /// Bits: this rank's, and those of all.
  at::Tensor own_;
  at::Tensor all_;
  WorkPtr work_;
};

}  // namespace libddp
