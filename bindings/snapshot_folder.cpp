// What `libddp snapshot` looks at: folders of snapshots, their files, the keeper of a run.

#include "libddp/slots/snapshot_folder.h"

#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_objects.h"
#include "libddp/keeper/keeper_client.h"
#include "libddp/slots/object_folder.h"
#include "libddp/slots/scatter.h"
#include "libddp/snapshot/run_name.h"
#include "libddp/snapshot/saved_version.h"
#include "libddp/snapshot/version_reader.h"

namespace py = pybind11;

namespace libddp {
namespace {

Deadline within(double seconds) {
  return Deadline::after(std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds)));
}

/// Paths are bytes: what is no UTF-8 stays what it is.
py::list entries_of(const SnapshotStore& store) {
  py::list found;
  for (const SnapshotStore::Entry& entry : store.list()) {
    found.append(py::make_tuple(entry.saved.step, entry.saved.sequence, py::bytes(entry.path)));
  }
  return found;
}

py::list unfinished_in(const SnapshotStore& store) {
  py::list found;
  for (const SnapshotStore::Part& part : store.unfinished()) {
    found.append(
        py::make_tuple(part.saved.step, part.saved.sequence, part.start, py::bytes(part.path)));
  }
  return found;
}

SnapshotStore::Entry entry_of(std::int64_t step, std::uint64_t sequence, std::string path) {
  return {.saved = {.step = step, .sequence = sequence}, .path = std::move(path)};
}

/// What Python may hold: it changes nothing.
std::shared_ptr<ChunkSource> open_rank(const SnapshotStore& store, std::int64_t step,
                                       std::uint64_t sequence, const std::string& path,
                                       const StoredRank& rank) {
  return std::const_pointer_cast<ChunkSource>(store.source(entry_of(step, sequence, path), rank));
}

/// Key, dtype, shape of the whole tensor, range of elements.
py::list stored_pieces(const ChunkSource& file) {
  py::list found;
  for (const Piece& piece : file.layout().pieces()) {
    found.append(py::make_tuple(piece.key, piece.dtype, piece.shape, piece.begin, piece.end));
  }
  return found;
}

/// Begin, end, and the tensors that lie there.
using FoundDamage = std::tuple<std::uint64_t, std::uint64_t, std::string>;

std::vector<FoundDamage> damage_of(const ChunkSource& file, int num_threads) {
  std::vector<FoundDamage> found;
  for (const Damage& each : find_damage(file, num_threads)) {
    found.emplace_back(each.begin, each.end, file.layout().describe(each.begin, each.end));
  }
  return found;
}

/// All of it, in one process.
std::shared_ptr<SavedVersion> open_version(const std::shared_ptr<const SnapshotStore>& store,
                                           std::int64_t step, std::uint64_t sequence,
                                           std::string path) {
  auto version = std::make_shared<SavedVersion>(
      SavedVersion::on_storage(store, entry_of(step, sequence, std::move(path))));
  version->open(/*rank=*/0);
  return version;
}

void read_tensors(const SavedVersion& version,
                  const std::vector<std::pair<std::string, at::Tensor>>& tensors, int num_threads) {
  std::vector<SnapshotTensor> wanted;
  for (const auto& [key, tensor] : tensors) wanted.push_back(SnapshotTensor::whole(key, tensor));
  const py::gil_scoped_release release;
  VersionReader(version, wanted).run(num_threads);
}

std::unique_ptr<KeeperClient> connect(const std::string& run, double timeout) {
  const py::gil_scoped_release release;
  return std::make_unique<KeeperClient>(run, KeeperClient::Role{}, within(timeout));
}

void bind_files(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<StoredRank>(module, "StoredRank")
      .def_readonly("rank", &StoredRank::rank)
      .def_readonly("file", &StoredRank::file)
      .def_property_readonly("bytes", [](const StoredRank& self) { return self.stored.bytes; })
      .def_readonly("values", &StoredRank::values);
  py::class_<SnapshotIndex>(module, "SnapshotIndex")
      .def_readonly("world_size", &SnapshotIndex::world_size)
      .def_readonly("ranks", &SnapshotIndex::ranks);
  py::class_<ChunkSource, std::shared_ptr<ChunkSource>>(module, "StoredSource")
      .def_property_readonly("pieces", &stored_pieces)
      .def_property_readonly("data_bytes",
                             [](const ChunkSource& self) { return self.layout().data_bytes(); })
      .def("damage", &damage_of, py::arg("num_threads"), unlocked);
  py::class_<SnapshotStore, std::shared_ptr<SnapshotStore>>(module, "SnapshotStore")
      .def("list", &entries_of)
      .def("unfinished", &unfinished_in)
      .def(
          "read",
          [](const SnapshotStore& self, std::int64_t step, std::uint64_t sequence,
             std::string path) { return self.read(entry_of(step, sequence, std::move(path))); },
          py::arg("step"), py::arg("sequence"), py::arg("path"), unlocked)
      .def("open", &open_rank, py::arg("step"), py::arg("sequence"), py::arg("path"),
           py::arg("rank"), unlocked)
      .def("open_version", &open_version, py::arg("step"), py::arg("sequence"), py::arg("path"),
           unlocked);
  py::class_<SnapshotFolder, SnapshotStore, std::shared_ptr<SnapshotFolder>>(module,
                                                                             "SnapshotFolder")
      .def(py::init<std::string>(), py::arg("path"));
  py::class_<ObjectFolder, SnapshotStore, std::shared_ptr<ObjectFolder>>(module, "ObjectFolder")
      .def(py::init([](const py::object& objects) {
             return std::make_shared<ObjectFolder>(std::make_shared<PythonObjects>(objects));
           }),
           py::arg("objects"))
      .def(
          "run", [](ObjectFolder& self) { return self.run(/*may_create=*/false); }, unlocked,
          "Empty where there is none.");
}

}  // namespace

void bind_snapshot_folder(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  bind_files(module);
  module.def("read_tensors", &read_tensors, py::arg("version"), py::arg("tensors"),
             py::arg("num_threads"));
  py::class_<KeeperClient>(module, "KeeperClient")
      .def(py::init(&connect), py::arg("run"), py::arg("timeout"))
      .def("status", &KeeperClient::status, unlocked)
      .def(
          "store_newest",
          [](KeeperClient& self, double timeout) { return self.store_newest(within(timeout)); },
          py::arg("timeout"), unlocked)
      .def(
          "wait",
          [](KeeperClient& self, int rank, std::uint64_t sequence, double timeout) {
            self.wait(rank, sequence, within(timeout));
          },
          py::arg("rank"), py::arg("sequence"), py::arg("timeout"), unlocked);
  module.def(
      "run_of_folder",
      [](const std::string& folder) { return run_of_folder(folder, /*may_create=*/false); },
      py::arg("folder"), "Empty where the folder has none.");
  module.def("check_run_name", &check_run_name, py::arg("run"));
}

}  // namespace libddp
