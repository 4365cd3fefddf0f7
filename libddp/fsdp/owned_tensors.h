#pragma once

// Which parameters belong to a unit already: a second unit of the same parameter would fight the
// first one. Thread rule: `add` from any thread; one list for the process.
//
//   OwnedTensors owned;
//   if (auto owner = owned.add(parameter, "'weight' of unit 'h.0'")) refuse(*owner);
//   // the destructor lets go of what was added

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace libddp {

class OwnedTensors {
 public:
  OwnedTensors() = default;
  ~OwnedTensors();
  OwnedTensors(const OwnedTensors&) = delete;
  OwnedTensors& operator=(const OwnedTensors&) = delete;

  /// Who owns it already, in the words of its owner; nothing is added then.
  std::optional<std::string> add(const at::Tensor& tensor, std::string words);

 private:
  std::vector<const void*> added_;
};

}  // namespace libddp
