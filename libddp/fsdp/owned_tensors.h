#pragma once

// Which parameters belong to a unit already: a second unit of the same parameter would fight the
// first one. Thread rule: `add` from any thread; one list for the process.
//
//   OwnedTensors owned;
//   if (!owned.add(parameter)) refuse();     // the destructor lets go of what was added

#include <ATen/core/Tensor.h>

#include <vector>

namespace libddp {

class OwnedTensors {
 public:
  OwnedTensors() = default;
  ~OwnedTensors();
  OwnedTensors(const OwnedTensors&) = delete;
  OwnedTensors& operator=(const OwnedTensors&) = delete;

  /// False if it belongs to somebody already.
  bool add(const at::Tensor& tensor);

 private:
  std::vector<const void*> added_;
};

}  // namespace libddp
