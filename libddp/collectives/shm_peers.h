#pragma once

// The ranks of a host that form a communicator: who they are, and their memory as mapped here, the
// control pages and the arenas. Besides that what the pages tell for messages: the last calls, and
// delays between hosts.
//
// Ranks are counted on this host; `group_rank` is their number in the group.
// Thread rule: `record` and `show_delay` belong to the thread of the collectives, the rest to any.
//
//   ShmPeers peers(std::move(options));
//   peers.page(1).mail_event();

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/comm.h"
#include "libddp/collectives/shm_options.h"
#include "libddp/collectives/shm_page.h"
#include "libddp/collectives/wait_ledger.h"

namespace libddp {

class ShmPeers {
 public:
  /// Throws ArgumentError where the options make no communicator, PeerError where the page of a
  /// rank is too small.
  explicit ShmPeers(ShmCommOptions options);
  ShmPeers(const ShmPeers&) = delete;
  ShmPeers& operator=(const ShmPeers&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  /// Ranks of the whole group.
  int group_size() const { return group_size_; }
  int group_rank(int rank) const { return members_[rank].group_rank; }
  /// Back; -1 for one that is not here.
  int index_of(int group_rank) const;
  pid_t pid_of(int rank) const { return members_[rank].pid; }
  std::vector<std::string> cpu_masks() const;
  /// "libddp[group world, rank 0/2]", for messages.
  std::string where() const;

  ShmPage page(int rank) const { return pages_[rank]; }
  const std::vector<ShmPage>& pages() const { return pages_; }
  ShmPage own_page() const { return pages_[rank_]; }

  /// Null where this rank has none.
  Arena* arena() const { return arena_.get(); }
  /// Offset of own memory in the own arena; Slot::kStaged if it is elsewhere.
  std::uint64_t offset_of(const void* pointer, std::size_t bytes) const;
  const SharedSegment& arena_of(int rank) const {
    return rank == rank_ ? arena_->segment() : members_[rank].arena;
  }

  /// Shows the peers what this rank calls now.
  void record(const CommCall& call);
  /// "all_reduce #42 float32 [8]" or "nothing yet".
  std::string last_call_of(int rank) const;
  /// 0 before the first.
  std::uint64_t last_sequence_of(int rank) const;

  /// Tells the ranks that wait for this one in the last stage whom it waited for itself.
  void show_delay(Delay delay);
  Delay delay_shown_by(int rank) const;

 private:
  void validate(const ShmCommOptions& options) const;

  int rank_;
  int world_size_;
  int group_size_;
  std::string group_name_;
  std::shared_ptr<Arena> arena_;
  std::vector<ShmMember> members_;
  std::vector<ShmPage> pages_;
};

}  // namespace libddp
