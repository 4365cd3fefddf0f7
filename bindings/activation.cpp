// libddp._C.checkpoint: what libddp.utils.checkpoint calls.

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/activation.h"
#include "bindings/saved_slot.h"
#include "libddp/activation/checkpoint_error.h"
#include "libddp/activation/frame.h"
#include "libddp/activation/saved_input.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// The arguments of a call, with the tensors among them kept as inputs of a block.
class KeptArguments {
 public:
  KeptArguments(const py::tuple& args, const py::dict& kwargs) {
    positional_.reserve(args.size());
    for (py::handle value : args) positional_.emplace_back(value);
    for (const auto& [name, value] : kwargs) {
      names_.push_back(py::reinterpret_borrow<py::object>(name));
      named_.emplace_back(value);
    }
  }

  py::tuple args(const Frame::Name& block) const {
    py::tuple args(positional_.size());
    for (std::size_t i = 0; i < positional_.size(); ++i) {
      args[i] = positional_[i].get([&] { return block() + ": input " + std::to_string(i); });
    }
    return args;
  }

  py::dict kwargs(const Frame::Name& block) const {
    py::dict kwargs;
    for (std::size_t i = 0; i < named_.size(); ++i) {
      kwargs[names_[i]] =
          named_[i].get([&] { return block() + ": input " + names_[i].cast<std::string>(); });
    }
    return kwargs;
  }

 private:
  struct Value {
    explicit Value(py::handle value) {
      if (THPVariable_Check(value.ptr())) {
        tensor.emplace(THPVariable_Unpack(value.ptr()));
      } else {
        object = py::reinterpret_borrow<py::object>(value);
      }
    }

    py::object get(const Frame::Name& name) const {
      if (!tensor) return object;
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor->unpack(name)));
    }

    std::optional<SavedInput> tensor;
    py::object object;
  };

  std::vector<Value> positional_;
  std::vector<py::object> names_;
  std::vector<Value> named_;
};

/// Containers nested deeper than this are not searched (a cycle must end somewhere).
constexpr int kMaxArgumentDepth = 8;

/// Of tensors in tuples, lists and dicts.
void add_devices(py::handle value, int depth, std::vector<c10::Device>& devices) {
  if (THPVariable_Check(value.ptr())) {
    add_random_device(devices, THPVariable_Unpack(value.ptr()).device());
  } else if (depth == kMaxArgumentDepth) {
    return;
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
      add_devices(item, depth + 1, devices);
    }
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& item : py::reinterpret_borrow<py::dict>(value)) {
      add_devices(item.second, depth + 1, devices);
    }
  }
}

/// Calls the block again; true unless it raised. The pass ends it by an exception of its own.
void replay_block(const py::object& function, const KeptArguments& kept, const Frame::Name& name,
                  const std::shared_ptr<Frame>& frame, const std::shared_ptr<ReplayPass>& pass) {
  const py::tuple args = kept.args(name);
  const py::dict kwargs = kept.kwargs(name);
  const HookScope hooks(frame, pass);
  const auto result =
      py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
  if (result) return;
  if (!pass->is_stopped() || PyErr_ExceptionMatches(stop_replay_type()) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();
}

std::shared_ptr<Frame> make_frame(const Frame::Settings& settings, const py::object& function,
                                  const py::object& name_of, const py::tuple& args,
                                  const py::dict& kwargs) {
  Frame::Name name = [function, name_of] { return name_of(function).cast<std::string>(); };
  // The function lives in the frame: it may hold a plain pointer to it, but not a share.
  auto own = std::make_shared<Frame*>(nullptr);
  auto frame = std::make_shared<Frame>(
      settings, name,
      [function, name, own, kept = std::make_shared<KeptArguments>(args, kwargs)](
          const std::shared_ptr<ReplayPass>& pass) {
        replay_block(function, *kept, name, (*own)->shared_from_this(), pass);
      });
  *own = frame.get();
  return frame;
}

/// function(*args, **kwargs), recomputed in backward by replay(*args, **kwargs).
py::object checkpoint(const py::object& function, const py::object& replay,
                      const py::object& name_of, const Frame::Settings& settings,
                      const py::tuple& args, const py::dict& kwargs, const py::object& on_error) {
  const auto frame = make_frame(settings, replay, name_of, args, kwargs);
  if (!on_error.is_none()) {
    frame->on_difference([on_error](const std::string& message) { on_error(message); });
  }
  std::vector<c10::Device> devices;
  add_devices(args, 0, devices);
  add_devices(kwargs, 0, devices);
  frame->begin_forward(devices);
  py::object result;
  {
    const HookScope hooks(frame);
    result =
        py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
  }
  if (!result) throw py::error_already_set();
  frame->end_forward();
  return result;
}

}  // namespace

void bind_activation(py::module_& module) {
  py::class_<Frame::Settings>(module, "CheckpointSettings", "How a block is recomputed.")
      .def(py::init(
               [](bool preserve_random, std::optional<bool> stop_early, bool check_determinism) {
                 return Frame::Settings{preserve_random, stop_early, check_determinism};
               }),
           py::arg("preserve_random") = true, py::arg("stop_early") = py::none(),
           py::arg("check_determinism") = true);
  bind_activation_node(module);
  bind_activation_selective(module);
  module.attr("StopReplay") = py::reinterpret_borrow<py::object>(stop_replay_type());
  module.def("checkpoint", &checkpoint, py::arg("function"), py::arg("replay"), py::arg("name_of"),
             py::arg("settings"), py::arg("args"), py::arg("kwargs"),
             py::arg("on_error") = py::none(),
             "Calls a block whose saved tensors are dropped and recomputed in backward.");
}

}  // namespace libddp
