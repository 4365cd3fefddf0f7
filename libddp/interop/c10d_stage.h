#pragma once

// The stage between hosts over another c10d backend (Gloo, UCC, MPI): it moves the bytes of
// collectives that are larger than 16 KiB.
//
// Who calls what is still compared over libddp's own links before a byte moves, so a mismatch or a
// missing rank is named as ever, and what is small travels with that comparison. The backend works
// on memory of its own: a failed group lets go of its callers at once, whatever the backend does.
// Thread rule: as InterStage.
//
//   C10dStage stage(local, identity, {.host = 0, .num_hosts = 2}, std::move(links), engine);

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "libddp/base/deadline.h"
#include "libddp/base/group_identity.h"
#include "libddp/collectives/hierarchical_comm.h"
#include "libddp/interop/c10d_waiters.h"

namespace libddp {

/// How long leaders wait for each other before they join an engine; their groups have met.
constexpr std::chrono::seconds kInterJoin{60};

class C10dStage : public InterStage {
 public:
  C10dStage(ShmComm& local, GroupIdentity identity, InterPlace place,
            std::unique_ptr<InterStage> links, c10::intrusive_ptr<c10d::Backend> engine);

  bool is_leader() const override { return true; }
  void begin(const CommCall& call) override;
  void barrier() override { links_->barrier(); }
  void all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                  int num_averaged) override;
  /// The engine's own where it has one.
  void reduce_scatter(const std::vector<Region>& regions, int host, std::byte* output,
                      const Reduction& reduction, int num_averaged) override;
  void all_gather(const std::vector<Region>& regions) override;
  void broadcast(std::byte* data, std::size_t bytes, int root_host) override;
  std::optional<std::string> last_call_of(int rank) const override {
    return links_->last_call_of(rank);
  }
  std::optional<GroupFailure> look_at_network(std::int64_t now_ns) override {
    return links_->look_at_network(now_ns);
  }

 private:
  using WorkHandle = c10::intrusive_ptr<c10d::Work>;

  using Issue = std::function<WorkHandle(std::chrono::milliseconds timeout)>;

  at::Tensor scratch(std::size_t bytes) const;
  /// Issues and waits; throws what the group fails with.
  void run(const Issue& issue);
  /// False, with nothing sent, where the engine lacks the operation: the same on all hosts.
  bool try_run(const Issue& issue);
  void wait_for(const WorkHandle& work);
  /// Fails, unless somebody who knows the cause does it first.
  [[noreturn]] void give_up(const std::exception_ptr& error);
  [[noreturn]] void fail(const std::exception_ptr& error);
  std::chrono::milliseconds time_left() const;

  ShmComm& local_;
  const GroupIdentity identity_;
  const InterPlace place_;
  const std::unique_ptr<InterStage> links_;
  const c10::intrusive_ptr<c10d::Backend> engine_;
  C10dWaiters waiters_;
  const CommCall* call_ = nullptr;
  Deadline deadline_ = Deadline::never();
  bool has_reduce_scatter_ = true;
};

}  // namespace libddp
