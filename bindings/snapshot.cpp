// libddp._C.Snapshot: what libddp.Snapshot calls.

#include "libddp/snapshot/snapshot.h"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_objects.h"
#include "libddp/snapshot/load_attempts.h"
#include "libddp/snapshot/remote_storage.h"
#include "libddp/snapshot/saved_version.h"

namespace py = pybind11;

namespace libddp {
namespace {

using Seconds = std::chrono::duration<double>;
/// Key, tensor, shape of the whole one, range of elements, who stores it.
using PythonTensor =
    std::tuple<std::string, at::Tensor, std::vector<std::int64_t>, std::int64_t, std::int64_t, int>;

std::vector<SnapshotTensor> tensors_of(const std::vector<PythonTensor>& given) {
  std::vector<SnapshotTensor> tensors;
  tensors.reserve(given.size());
  for (const auto& [key, tensor, shape, begin, end, stored_by] : given) {
    tensors.push_back({key, tensor, shape, begin, end, static_cast<StoredBy>(stored_by)});
  }
  return tensors;
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(seconds));
}

std::shared_ptr<Snapshot> make_snapshot(Group group, std::string folder, int keep, int replicas,
                                        std::string run, double linger, int num_threads,
                                        const py::object& objects, StorageHelper helper,
                                        bool in_memory) {
  std::shared_ptr<const RemoteStorage> remote;
  if (!objects.is_none()) {
    remote = std::make_shared<RemoteStorage>(RemoteStorage{
        .objects = std::make_shared<PythonObjects>(objects), .helper = std::move(helper)});
  }
  const py::gil_scoped_release release;
  return Snapshot::create(std::move(group), {.folder = std::move(folder),
                                             .remote = std::move(remote),
                                             .keep = keep,
                                             .in_memory = in_memory,
                                             .replicas = replicas,
                                             .run = std::move(run),
                                             .linger = milliseconds(linger),
                                             .num_threads = num_threads});
}

std::tuple<std::int64_t, std::uint64_t, double, bool> save(Snapshot& snapshot, std::int64_t step,
                                                           const std::vector<PythonTensor>& tensors,
                                                           const std::string& values,
                                                           bool in_folder) {
  const std::vector<SnapshotTensor> own = tensors_of(tensors);
  const py::gil_scoped_release release;
  const Snapshot::Report report =
      snapshot.save(step, own, values, in_folder ? Storage::Folder : Storage::Memory);
  return {report.step, report.bytes, Seconds(report.stall).count(), report.is_stored};
}

void read(Snapshot& snapshot, SavedVersion& version, const std::vector<PythonTensor>& tensors) {
  const std::vector<SnapshotTensor> wanted = tensors_of(tensors);
  const py::gil_scoped_release release;
  snapshot.read(version, wanted);
}

void prepare(Snapshot& snapshot, const std::vector<PythonTensor>& tensors) {
  const std::vector<SnapshotTensor> expected = tensors_of(tensors);
  const py::gil_scoped_release release;
  snapshot.prepare(expected);
}

/// Key -> dtype, shape.
py::dict pieces_of(const SavedVersion& version) {
  py::dict pieces;
  for (const auto& [key, piece] : version.pieces()) {
    pieces[py::str(key)] = py::make_tuple(scalar_type_of(piece.dtype), piece.shape);
  }
  return pieces;
}

}  // namespace

void bind_snapshot(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<SavedVersion, std::shared_ptr<SavedVersion>>(module, "SavedVersion")
      .def_property_readonly("step", [](const SavedVersion& self) { return self.saved().step; })
      .def_property_readonly("sequence",
                             [](const SavedVersion& self) { return self.saved().sequence; })
      .def_property_readonly("is_in_memory", &SavedVersion::is_in_memory)
      .def_property_readonly("world_size", &SavedVersion::world_size)
      .def_property_readonly("name", &SavedVersion::name)
      .def_property_readonly("values", &SavedVersion::values)
      .def_property_readonly("tensors", &pieces_of);
  py::class_<LoadAttempts>(module, "LoadAttempts")
      .def(py::init<>())
      .def("pass_over", &LoadAttempts::pass_over, py::arg("reason"), py::arg("is_damaged"))
      .def_property_readonly("has_passed_over", &LoadAttempts::has_passed_over)
      .def("went_on", &LoadAttempts::went_on, py::arg("name"))
      .def("check", &LoadAttempts::check);
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot")
      .def(py::init([](Group group, std::string folder, int keep, int replicas, std::string run,
                       double linger, int num_threads, const py::object& objects,
                       std::vector<std::string> helper, std::vector<std::string> environment,
                       bool in_memory) {
             return make_snapshot(
                 std::move(group), std::move(folder), keep, replicas, std::move(run), linger,
                 num_threads, objects,
                 {.program = std::move(helper), .environment = std::move(environment)}, in_memory);
           }),
           py::kw_only(), py::arg("group"), py::arg("folder"), py::arg("keep"), py::arg("replicas"),
           py::arg("run"), py::arg("linger"), py::arg("num_threads"),
           py::arg("objects") = py::none(), py::arg("helper") = std::vector<std::string>(),
           py::arg("environment") = std::vector<std::string>(), py::arg("in_memory") = true)
      .def("save", &save, py::arg("step"), py::arg("tensors"), py::arg("values"),
           py::arg("in_folder"))
      .def("prepare", &prepare, py::arg("tensors"))
      .def_property_readonly("prepared_bytes",
                             [](Snapshot& self) {
                               const py::gil_scoped_release release;
                               return self.prepared_bytes();
                             })
      .def("versions", &Snapshot::versions, unlocked)
      .def("open", &Snapshot::open, py::arg("version"), unlocked)
      .def("read", &read, py::arg("version"), py::arg("tensors"))
      .def(
          "wait", [](Snapshot& self, double timeout) { self.wait(milliseconds(timeout)); },
          py::arg("timeout"), unlocked)
      .def("close", &Snapshot::close, unlocked)
      .def("status", &Snapshot::status, unlocked);
}

}  // namespace libddp
