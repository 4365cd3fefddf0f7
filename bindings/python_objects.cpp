#include "bindings/python_objects.h"

#include <memory>
#include <utility>

#include "libddp/base/error.h"

namespace py = pybind11;

namespace libddp {
namespace {

/// What Python raises says what and where already; it must not leave without the GIL.
template <typename Call>
auto in_python(Call&& call) {
  const py::gil_scoped_acquire acquire;
  try {
    return call();
  } catch (py::error_already_set& error) {
    throw SnapshotError(py::str(error.value()).cast<std::string>());
  }
}

}  // namespace

PythonObjects::PythonObjects(py::object objects)
    : objects_(std::move(objects)), address_(objects_.attr("address").cast<std::string>()) {}

PythonObjects::~PythonObjects() {
  const py::gil_scoped_acquire acquire;
  objects_ = py::object();
}

std::vector<std::string> PythonObjects::list() const {
  return in_python([&] { return objects_.attr("list")().cast<std::vector<std::string>>(); });
}

std::string PythonObjects::read(const std::string& name, std::uint64_t offset,
                                std::uint64_t bytes) const {
  return in_python([&] { return objects_.attr("read")(name, offset, bytes).cast<std::string>(); });
}

void PythonObjects::write(const std::string& name, std::uint64_t bytes,
                          const std::function<void(const Append&)>& produce) {
  // Its last reference goes with the GIL, too.
  const auto with_gil = [](py::object* held) {
    const py::gil_scoped_acquire acquire;
    delete held;
  };
  const std::unique_ptr<py::object, decltype(with_gil)> file(
      in_python([&] { return new py::object(objects_.attr("writing")(name, bytes)); }), with_gil);
  try {
    produce([&](std::span<const std::byte> part) {
      in_python([&] {
        file->attr("append")(py::bytes(reinterpret_cast<const char*>(part.data()), part.size()));
      });
    });
  } catch (...) {
    in_python([&] { file->attr("discard")(); });
    throw;
  }
  in_python([&] { file->attr("close")(); });
}

void PythonObjects::create(const std::string& name, const std::string& text) {
  in_python([&] { objects_.attr("create")(name, py::bytes(text)); });
}

void PythonObjects::remove(const std::vector<std::string>& names) {
  in_python([&] { objects_.attr("remove")(names); });
}

}  // namespace libddp
