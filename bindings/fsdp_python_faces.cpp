#include "bindings/fsdp_python_faces.h"

#include <utility>

#include "bindings/fsdp_faces.h"

namespace py = pybind11;

namespace libddp {

class PythonFaces::Held {
 public:
  explicit Held(const py::weakref& reference) : faces_(reference()) {}

  /// Whether it is gone, at the end of the model.
  bool is_gone() const { return faces_.is_none(); }
  py::object wrapped(std::size_t index) const {
    static PyObject* const name = PyUnicode_InternFromString("wrapped_modules");
    return py::list(attribute_of(faces_, name))[index];
  }
  /// Empty where Python does what is to be done.
  py::list rows(std::size_t index) const {
    static PyObject* const name = PyUnicode_InternFromString("rows");
    return attribute_of(wrapped(index), name);
  }
  template <typename... Arguments>
  py::object call(const char* name, Arguments&&... arguments) const {
    return faces_.attr(name)(std::forward<Arguments>(arguments)...);
  }

 private:
  const py::gil_scoped_acquire gil_;
  const py::object faces_;
};

PythonFaces::PythonFaces(const py::object& faces,
                         const std::vector<std::shared_ptr<ParamGroup>>& units)
    : faces_(faces), nothing_(faces.attr("nothing")) {
  for (const auto& unit : units) {
    index_[unit.get()] = units_.size();
    units_.push_back(unit.get());
  }
}

PythonFaces::~PythonFaces() {
  const py::gil_scoped_acquire gil;
  faces_ = py::weakref();
  nothing_ = py::object();
}

void PythonFaces::show(ParamGroup& unit, bool whole) {
  const Held held(faces_);
  if (held.is_gone()) return;
  const std::size_t index = index_.at(&unit);
  const py::list rows = held.rows(index);
  if (!rows.empty()) return show_faces(rows, !whole);
  held.call("show", held.wrapped(index), !whole);
}

void PythonFaces::take_over() {
  const Held held(faces_);
  if (held.is_gone()) return;
  for (std::size_t i = 0; i < units_.size(); ++i) {
    if (units_[i]->is_held()) continue;
    const py::list rows = held.rows(i);
    if (!rows.empty()) {
      take_over_faces(rows, nothing_);
    } else {
      held.call("take_over", held.wrapped(i));
    }
  }
}

void PythonFaces::show_gradients() {
  const Held held(faces_);
  if (held.is_gone()) return;
  for (std::size_t i = 0; i < units_.size(); ++i) show_gradients(held, i);
}

void PythonFaces::show_gradients(ParamGroup& unit) {
  const Held held(faces_);
  if (!held.is_gone()) show_gradients(held, index_.at(&unit));
}

void PythonFaces::show_gradients(const Held& held, std::size_t index) {
  const py::list rows = held.rows(index);
  if (!rows.empty()) return show_face_gradients(rows);
  held.call("show_gradients", held.wrapped(index));
}

bool PythonFaces::has_late_hooks(ParamGroup& unit) {
  const Held held(faces_);
  if (held.is_gone()) return false;
  const std::size_t index = index_.at(&unit);
  const py::list rows = held.rows(index);
  if (!rows.empty()) return have_face_hooks(rows);
  return held.call("has_late_hooks", held.wrapped(index)).cast<bool>();
}

void PythonFaces::run_late_hooks(ParamGroup& unit) {
  const Held held(faces_);
  if (held.is_gone()) return;
  const std::size_t index = index_.at(&unit);
  const py::list rows = held.rows(index);
  if (!rows.empty() && !have_face_hooks(rows)) return;
  held.call("run_late_hooks", held.wrapped(index),
            py::cast(&unit, py::return_value_policy::reference));
}

}  // namespace libddp
