#pragma once

// From a save into tensors, which may have other ranges than those that were saved.
// Thread rule: one thread.
//
//   VersionReader reader(version, tensors);       // REQUIRES that it is open
//   if (reader.missing().empty()) reader.run(/*num_threads=*/1);

#include <string>
#include <vector>

#include "libddp/slots/read_plan.h"
#include "libddp/snapshot/saved_version.h"
#include "libddp/snapshot/snapshot_tensor.h"
#include "libddp/snapshot/staged_targets.h"

namespace libddp {

class VersionReader {
 public:
  /// Throws ArgumentError where the save has other keys, shapes or dtypes; nothing is changed yet.
  VersionReader(const SavedVersion& version, const std::vector<SnapshotTensor>& tensors);

  /// What no source on this host has, as a clause; empty if all is here.
  const std::string& missing() const { return plan_.missing; }
  /// Fills the tensors. Throws SnapshotError for bytes that are damaged or not here: they are then
  /// filled in part. ArgumentError where one is expanded and has several values in the save.
  void run(int num_threads);

 private:
  /// A tensor that is not dense.
  struct Copy {
    std::string key;
    at::Tensor tensor;
    /// What is copied to it in the end, on the host.
    at::Tensor plain;
  };

  void add(const SnapshotTensor& tensor);
  static void finish(const Copy& copy);

  const SavedVersion& version_;
  std::vector<WantedPiece> wanted_;
  StagedTargets on_devices_;
  std::vector<Copy> copies_;
  ReadPlan plan_;
};

}  // namespace libddp
