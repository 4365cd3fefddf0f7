// libddp._C: the extension module.

#include "bindings/bindings.h"
#include "bindings/run_key.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of libddp. Use libddp.distributed and libddp.nn.parallel.";
  pybind11::module_::import("torch.distributed");  // registers c10d's types
  libddp::bind_errors(module);
  libddp::bind_build_info(module);
  libddp::bind_interpreter(module);
  libddp::bind_run_key(module);
  libddp::bind_process_group(module);
  libddp::bind_backend(module);
  libddp::bind_straight(module);
#ifdef LIBDDP_WITH_MODELS
  libddp::bind_ddp(module);
  libddp::bind_fsdp(module);
  libddp::bind_optim(module);
#endif
#ifdef LIBDDP_WITH_SNAPSHOT
  libddp::bind_elastic(module);
  libddp::bind_snapshot(module);
  libddp::bind_snapshot_folder(module);
#endif
#ifdef LIBDDP_WITH_ACTIVATION
  libddp::bind_activation(module);
#endif
}
