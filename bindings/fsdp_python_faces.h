#pragma once

// The DTensors of a model, for the C++ model: libddp.distributed.fsdp.wrap._faces.Faces, of which
// this does what all parameters need in every step, and asks it for the rest.
// Thread rule: any thread, which needs no GIL.

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "libddp/fsdp/param_group.h"
#include "libddp/fsdp/parameter_faces.h"

namespace libddp {

class PythonFaces final : public ParameterFaces {
 public:
  /// `faces` has the model, so it is held weakly; its `wrapped_modules` are in the order of
  /// `units`.
  PythonFaces(const pybind11::object& faces, const std::vector<std::shared_ptr<ParamGroup>>& units);
  ~PythonFaces() override;

  void show(ParamGroup& unit, bool whole) override;
  void take_over() override;
  void show_gradients() override;
  void show_gradients(ParamGroup& unit) override;
  bool has_late_hooks(ParamGroup& unit) override;
  void run_late_hooks(ParamGroup& unit) override;

 private:
  /// The Python side, with the GIL.
  class Held;

  void show_gradients(const Held& held, std::size_t index);

  pybind11::weakref faces_;
  pybind11::object nothing_;
  std::vector<const ParamGroup*> units_;
  std::unordered_map<const ParamGroup*, std::size_t> index_;
};

}  // namespace libddp
