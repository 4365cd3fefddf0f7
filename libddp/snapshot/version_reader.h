#pragma once

// From a save into tensors, which may have other ranges than those that were saved.
// Thread rule: one thread.
//
//   VersionReader reader(version, tensors);       // REQUIRES that it is open
//   if (reader.missing().empty()) reader.run(/*num_threads=*/1);

#include <string>
#include <utility>
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
  /// filled in part.
  void run(int num_threads);

 private:
  void add(const SnapshotTensor& tensor);

  const SavedVersion& version_;
  std::vector<WantedPiece> wanted_;
  StagedTargets on_devices_;
  /// Tensors that are not dense, and what is copied to them in the end.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  ReadPlan plan_;
};

}  // namespace libddp
