// libddp/elastic: what libddp.elastic.run needs of the launcher's line.

#include <string>

#include "bindings/bindings.h"
#include "libddp/elastic/launcher_line.h"

namespace py = pybind11;

namespace libddp {
namespace {

py::dict as_dict(const Assignment& next) {
  py::dict told;
  told["epoch"] = next.epoch;
  told["restarts"] = next.restarts;
  told["is_survivor"] = next.is_survivor;
  told["failure"] = next.failure;
  told["environment"] = py::cast(next.environment);
  return told;
}

py::dict wait(LauncherLine& self, double seconds) {
  Assignment next;
  {
    const py::gil_scoped_release released;
    next = self.wait(
        Deadline::after(std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3))));
  }
  return as_dict(next);
}

}  // namespace

void bind_elastic(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<LauncherLine, std::unique_ptr<LauncherLine, py::nodelete>>(module, "LauncherLine")
      .def_static("find", &LauncherLine::find, py::return_value_policy::reference, unlocked,
                  "This process's; None where no `libddp run --in-place` has started it.")
      .def_static("is_asked", &LauncherLine::is_asked)
      .def("arrive", &LauncherLine::arrive, unlocked)
      .def("come", &LauncherLine::come, py::arg("why"), unlocked)
      .def("wait", &wait, py::arg("seconds"));
}

}  // namespace libddp
