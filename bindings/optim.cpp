// libddp._C.fused_adamw: what libddp.optim.AdamW calls.

#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "libddp/optim/fused_adamw.h"

namespace py = pybind11;

namespace libddp {
namespace {

using TensorList = std::vector<at::Tensor>;

/// One dict per parameter, with torch's names.
py::list make_state(const TensorList& parameters, bool amsgrad) {
  const AdamwState state = make_adamw_state(parameters, amsgrad);
  py::list entries;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    py::dict entry;
    entry["step"] = state.steps[i];
    entry["exp_avg"] = state.exp_avgs[i];
    entry["exp_avg_sq"] = state.exp_avg_sqs[i];
    if (amsgrad) entry["max_exp_avg_sq"] = state.max_exp_avg_sqs[i];
    entries.append(std::move(entry));
  }
  return entries;
}

std::size_t run_fused_adamw(const TensorList& parameters, const TensorList& gradients,
                            TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                            TensorList steps, double lr, double beta1, double beta2, double eps,
                            double weight_decay, bool amsgrad, bool maximize,
                            const std::optional<at::Tensor>& grad_scale,
                            const std::optional<at::Tensor>& found_inf) {
  const py::gil_scoped_release release;
  return fused_adamw(
      parameters, gradients,
      {std::move(exp_avgs), std::move(exp_avg_sqs), std::move(max_exp_avg_sqs), std::move(steps)},
      {lr, beta1, beta2, eps, weight_decay, amsgrad, maximize}, grad_scale.value_or(at::Tensor()),
      found_inf.value_or(at::Tensor()));
}

}  // namespace

void bind_optim(py::module_& module) {
  module.def("make_adamw_state", &make_state, py::arg("parameters"), py::arg("amsgrad"));
  module.def("fused_adamw", &run_fused_adamw, py::arg("parameters"), py::arg("gradients"),
             py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("max_exp_avg_sqs"),
             py::arg("steps"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
             py::arg("eps"), py::arg("weight_decay"), py::arg("amsgrad"), py::arg("maximize"),
             py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none());
}

}  // namespace libddp
