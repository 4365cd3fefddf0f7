// libddp._C.Replica: what libddp.nn.parallel.DistributedDataParallel calls.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/groups.h"
#include "libddp/ddp/compress_hook.h"
#include "libddp/ddp/replica.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// Containers nested deeper than this are not searched (a cycle must end somewhere).
constexpr int kMaxDepth = 16;

using PythonTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors named(const PythonTensors& tensors) {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors) result.push_back({name, tensor});
  return result;
}

/// Tensors in tensors, tuples, lists, dicts and dataclasses. What is not found here is found by its
/// gradients; see Reducer.
void collect(py::handle value, int depth, std::vector<at::Tensor>& found) {
  if (THPVariable_Check(value.ptr())) {
    found.push_back(THPVariable_Unpack(value.ptr()));
  } else if (depth >= kMaxDepth) {
    return;
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const py::handle part : value) collect(part, depth + 1, found);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) {
      collect(item.second, depth + 1, found);
    }
  } else if (py::hasattr(value, "__dataclass_fields__") && py::hasattr(value, "__dict__")) {
    collect(value.attr("__dict__"), depth + 1, found);
  }
}

/// Autograd knows only Python errors that are already set; any other exception would come out of
/// backward() as a plain RuntimeError.
[[noreturn]] void rethrow_as_python_error(std::exception_ptr error) {
  const py::gil_scoped_acquire gil;
  const py::cpp_function thrower([&error] { std::rethrow_exception(error); });
  PyObject* const result = PyObject_CallObject(thrower.ptr(), nullptr);
  Py_XDECREF(result);
  python_error python;
  python.persist();
  throw python;
}

std::shared_ptr<Replica> make_replica(const PythonTensors& parameters, const PythonTensors& buffers,
                                      Group group, std::size_t cap_bytes, std::size_t first_bytes,
                                      bool find_unused_parameters, bool static_graph,
                                      bool broadcast_buffers, bool init_sync,
                                      std::vector<std::string> sparse_parameters) {
  const py::gil_scoped_release release;
  const DistributedDataParallelOptions options{
      .cap_bytes = cap_bytes,
      .first_bytes = first_bytes,
      .find_unused_parameters = find_unused_parameters,
      .static_graph = static_graph,
      .sparse_parameters = std::move(sparse_parameters),
      .broadcast_buffers = broadcast_buffers,
      .init_sync = init_sync,
  };
  return std::make_shared<Replica>(named(parameters), named(buffers), std::move(group), options,
                                   &rethrow_as_python_error);
}

bool after_forward(Replica& replica, py::handle output, bool sync) {
  std::vector<at::Tensor> found;
  if (sync) collect(output, 0, found);
  return replica.after_forward(found, sync);
}

// A hook of Python's: torch's own adapter calls it and reads its future.
void register_comm_hook(Replica& replica, py::object state, py::object hook) {
  replica.reducer().set_comm_hook(
      std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook)));
}

void register_compress_hook(Replica& replica, at::ScalarType dtype) {
  replica.reducer().set_comm_hook(compress_hook(replica.group(), dtype));
}

/// Parameter indices, bucket by bucket: for tests and for the curious.
BucketPlan bucket_plan(Replica& replica) { return replica.reducer().buckets().plan(); }

}  // namespace

void bind_ddp(py::module_& module) {
  py::class_<Replica, std::shared_ptr<Replica>>(module, "Replica")
      .def(py::init(&make_replica), py::kw_only(), py::arg("parameters"), py::arg("buffers"),
           py::arg("group"), py::arg("cap_bytes"), py::arg("first_bytes"),
           py::arg("find_unused_parameters"), py::arg("static_graph"), py::arg("broadcast_buffers"),
           py::arg("init_sync"), py::arg("sparse_parameters") = std::vector<std::string>{})
      .def("broadcast", &Replica::broadcast, py::arg("tensors"), py::arg("root") = 0,
           py::call_guard<py::gil_scoped_release>())
      .def("after_forward", &after_forward, py::arg("output"), py::arg("sync"))
      .def("set_static_graph", &Replica::set_static_graph)
      .def(
          "run_empty_pass", [](Replica& replica) { replica.reducer().run_empty_pass(); },
          py::call_guard<py::gil_scoped_release>())
      .def("set_gradient_scale",
           [](Replica& replica, double scale) { replica.reducer().set_gradient_scale(scale); })
      .def("register_comm_hook", &register_comm_hook, py::arg("state"), py::arg("hook"))
      .def("register_compress_hook", &register_compress_hook, py::arg("dtype"))
      .def("bucket_plan", &bucket_plan);
}

}  // namespace libddp
