// What this build is: for `python -m libddp --version` and bug reports.

#include "libddp/base/build_info.h"

#include <torch/version.h>

#include "bindings/bindings.h"
#include "libddp/group/backend_registry.h"

namespace py = pybind11;

namespace libddp {

void bind_build_info(py::module_& module) {
  module.def(
      "build_info",
      [] {
        py::list compiled;
        for (SimdLevel level : compiled_simd_levels()) compiled.append(std::string(name(level)));
        py::dict info;
        info["version"] = std::string(version());
        info["torch"] = TORCH_VERSION;
        info["compiler"] = compiler();
        info["cuda"] = has_backend(c10::DeviceType::CUDA);
        info["simd"] = std::string(name(simd_level()));
        info["simd_compiled"] = compiled;
        return info;
      },
      "Version, torch that it was built for, compiler, whether it moves CUDA tensors, vector path "
      "in "
      "use and those compiled.");
}

}  // namespace libddp
