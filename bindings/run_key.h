#pragma once

// What the launcher needs of the run key. The key itself never gets into Python's memory, which a
// core dump would hold.

#include <torch/csrc/utils/pybind.h>

namespace libddp {

void bind_run_key(pybind11::module_& module);

}  // namespace libddp
