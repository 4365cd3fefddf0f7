#pragma once

// A c10d::FileStore that is gone when the last rank lets go of it.
//
// FileStore counts its users itself, but with two counters that are not changed together: ranks
// that leave at the same time can leave the file behind. Here each rank, after its FileStore has
// ended, adds itself to a count beside the file ("<path>.left"); the last one removes both. A count
// that is a link or another user's, or whose lock is held for 5 s, is left alone, with a warning.
// Thread rule: as FileStore.
//
//   auto store = c10::make_intrusive<RendezvousFile>("/shared/rendezvous", 8);

#include <string>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

namespace libddp {

/// Its destructor runs after that of the FileStore beside it, because it is the earlier base.
class LeavingCount {
 protected:
  LeavingCount(std::string path, int world_size)
      : path_(std::move(path)), world_size_(world_size) {}
  ~LeavingCount();

 private:
  const std::string path_;
  const int world_size_;
};

class RendezvousFile : private LeavingCount, public c10d::FileStore {
 public:
  RendezvousFile(const std::string& path, int world_size)
      // -1: FileStore must not remove the file on its own count.
      : LeavingCount(path, world_size), FileStore(path, -1) {}
};

}  // namespace libddp
