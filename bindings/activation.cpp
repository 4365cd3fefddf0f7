// libddp._C.checkpoint: what libddp.utils.checkpoint calls.

#include <ATen/core/grad_mode.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/activation.h"
#include "bindings/activation_errors.h"
#include "libddp/activation/checkpoint_error.h"
#include "libddp/activation/checkpoint_frame.h"
#include "libddp/activation/saved_input.h"
#include "libddp/activation/selective_store.h"
#include "libddp/activation/slot_scope.h"

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

  py::tuple args(const CheckpointFrame::Name& block) const {
    py::tuple args(positional_.size());
    for (std::size_t i = 0; i < positional_.size(); ++i) {
      args[i] = positional_[i].get([&] { return block() + ": input " + std::to_string(i); });
    }
    return args;
  }

  py::dict kwargs(const CheckpointFrame::Name& block) const {
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

    py::object get(const CheckpointFrame::Name& name) const {
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

/// A Python block: what it takes to call it again.
struct Block {
  py::object function;
  py::object name_of;
  py::object on_error;
  /// Hands out the results of operators that were kept, if any were.
  std::shared_ptr<ReplayRun> kept_results;
  KeptArguments kept;

  std::string name() const {
    const py::gil_scoped_acquire gil;
    return name_of(function).cast<std::string>();
  }

  /// Calls the block again. The pass ends it by an exception of its own.
  void replay(const std::shared_ptr<CheckpointFrame>& frame,
              const std::shared_ptr<ReplayPass>& pass) const;

  [[noreturn]] void fail(const std::string& message) const {
    const py::gil_scoped_acquire gil;
    try {
      if (!on_error.is_none()) on_error(message);
      throw CheckpointError(message);
    } catch (...) {
      throw_python_error();
    }
  }
};

void Block::replay(const std::shared_ptr<CheckpointFrame>& frame,
                   const std::shared_ptr<ReplayPass>& pass) const {
  const py::gil_scoped_acquire gil;
  try {
    const CheckpointFrame::Name own_name = [this] { return name(); };
    const py::tuple args = kept.args(own_name);
    const py::dict kwargs = kept.kwargs(own_name);
    if (kept_results) kept_results->rewind();
    const InterceptorScope handing_out(kept_results.get());
    const SlotScope scope(frame, pass);
    const auto result =
        py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
    if (result) return;
    if (!pass->is_stopped() || PyErr_ExceptionMatches(stop_replay_type()) == 0) {
      throw py::error_already_set();
    }
    PyErr_Clear();
  } catch (...) {
    throw_python_error();
  }
}

/// For compiled autograd, which knows hooks as a Python function and what it is called with.
std::pair<c10::SafePyObject, c10::SafePyObject> python_slot(
    const std::shared_ptr<CheckpointFrame>& frame, std::uint32_t slot) {
  const py::gil_scoped_acquire gil;
  py::object unpack = py::cpp_function(
      [frame, slot](const py::object&) { return frame->unpack(slot); }, py::arg("slot"));
  return {c10::SafePyObject(unpack.release().ptr(), getPyInterpreter()),
          c10::SafePyObject(py::none().release().ptr(), getPyInterpreter())};
}

/// Waits without the interpreter lock, which the replay that is waited for needs.
void wait_unlocked(const std::function<void()>& wait) {
  if (PyGILState_Check() == 0) return wait();
  const py::gil_scoped_release release;
  wait();
}

/// Its last owner may be a thread of autograd; the block's objects go under the interpreter lock.
std::shared_ptr<CheckpointFrame> make_frame(const CheckpointFrame::Settings& settings,
                                            Block block) {
  struct Held {
    Block block;
    CheckpointFrame* frame = nullptr;
  };
  // The block lives in the frame: it may hold a plain pointer to it, but not a share.
  auto held = std::make_shared<Held>(Held{std::move(block)});
  CheckpointFrame::Caller caller;
  caller.name = [held] { return held->block.name(); };
  caller.replay = [held](const std::shared_ptr<ReplayPass>& pass) {
    held->block.replay(held->frame->shared_from_this(), pass);
  };
  caller.stop = &throw_stop_replay;
  caller.fail = [held](const std::string& message) { held->block.fail(message); };
  caller.wait_unlocked = &wait_unlocked;
  caller.python_slot = &python_slot;
  const auto destroy = [](CheckpointFrame* frame) {
    const py::gil_scoped_acquire gil;
    delete frame;
  };
  Held& place = *held;
  const std::shared_ptr<CheckpointFrame> frame(new CheckpointFrame(settings, std::move(caller)),
                                               destroy);
  held.reset();
  place.frame = frame.get();
  return frame;
}

/// Of a context_fn: for the forward pass and for the replays.
using Runs = std::pair<std::shared_ptr<SavingRun>, std::shared_ptr<ReplayRun>>;

/// function(*args, **kwargs), recomputed in backward by replay(*args, **kwargs).
py::object checkpoint(const py::object& function, const py::object& replay,
                      const py::object& name_of, const CheckpointFrame::Settings& settings,
                      const py::tuple& args, const py::dict& kwargs, const py::object& on_error,
                      const std::optional<Runs>& runs) {
  const auto frame = make_frame(
      settings,
      Block{replay, name_of, on_error, runs ? runs->second : nullptr, KeptArguments(args, kwargs)});
  std::vector<c10::Device> devices;
  add_devices(args, 0, devices);
  add_devices(kwargs, 0, devices);
  frame->begin_forward(devices);
  py::object result;
  {
    const InterceptorScope keeping(runs ? runs->first.get() : nullptr);
    const SlotScope scope(frame);
    result =
        py::reinterpret_steal<py::object>(PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr()));
  }
  if (!result) throw py::error_already_set();
  frame->end_forward();
  return result;
}

}  // namespace

void bind_activation(py::module_& module) {
  py::class_<CheckpointFrame::Settings>(module, "CheckpointSettings", "How a block is recomputed.")
      .def(py::init(
               [](bool preserve_random, std::optional<bool> stop_early, bool check_determinism) {
                 return CheckpointFrame::Settings{preserve_random, stop_early, check_determinism};
               }),
           py::arg("preserve_random") = true, py::arg("stop_early") = py::none(),
           py::arg("check_determinism") = true);
  bind_activation_node(module);
  bind_activation_selective(module);
  module.attr("StopReplay") = py::reinterpret_borrow<py::object>(stop_replay_type());
  module.def("checkpoint", &checkpoint, py::arg("function"), py::arg("replay"), py::arg("name_of"),
             py::arg("settings"), py::arg("args"), py::arg("kwargs"),
             py::arg("on_error") = py::none(), py::arg("runs") = py::none(),
             "Calls a block whose saved tensors are dropped and recomputed in backward.");
}

}  // namespace libddp
