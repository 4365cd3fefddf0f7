// C10dBackend: send, recv and the batches of batch_isend_irecv.

#include "libddp/interop/c10d_run.h"
#include "libddp/interop/convert.h"
#include "libddp/interop/work_chain.h"

namespace libddp {
namespace {

constexpr int kAnySource = -1;

const char* title_of(Exchange::Direction direction, int peer) {
  if (direction == Exchange::Direction::Send) return "libddp:send";
  return peer == kAnySource ? "libddp:recvAnySource" : "libddp:recv";
}

c10d::OpType type_of(Exchange::Direction direction, int peer) {
  if (direction == Exchange::Direction::Send) return c10d::OpType::SEND;
  return peer == kAnySource ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
}

}  // namespace

C10dBackend::WorkHandle C10dBackend::exchange_one(Tensors& tensors, Exchange::Direction direction,
                                                  int peer, int tag) {
  const bool is_send = direction == Exchange::Direction::Send;
  return run(
      {type_of(direction, peer), title_of(direction, peer), tensors}, {tensors}, [&]() -> WorkPtr {
        C10dChecks checks(*group_, is_send ? "send" : "recv");
        if (tensors.size() != 1) checks.fail("takes a single tensor");
        checks.layout(tensors);
        const at::Tensor view = movable(tensors[0]);
        {
          std::lock_guard lock(batch_mutex_);
          if (batch_) {
            batch_->parts.push_back({direction, view, peer, tag});
            return done("part of a batch", {});  // endCoalescing's work is the one to wait for
          }
        }
        const CallOptions call = call_options(c10d::kUnsetTimeout, true);
        if (is_send) return group_->send(view, peer, tag, call);
        const auto source = peer == kAnySource ? std::nullopt : std::optional<int>(peer);
        return group_->recv(view, source, tag, call);
      });
}

C10dBackend::WorkHandle C10dBackend::send(Tensors& tensors, int target, int tag) {
  return exchange_one(tensors, Exchange::Direction::Send, target, tag);
}

C10dBackend::WorkHandle C10dBackend::recv(Tensors& tensors, int source, int tag) {
  return exchange_one(tensors, Exchange::Direction::Recv, source, tag);
}

C10dBackend::WorkHandle C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return exchange_one(tensors, Exchange::Direction::Recv, kAnySource, tag);
}

void C10dBackend::startCoalescing() {
  std::lock_guard lock(batch_mutex_);
  if (batch_) {
    for_torch([&] { C10dChecks(*group_, "startCoalescing").fail("a batch is open already"); });
  }
  batch_.emplace();
}

C10dBackend::WorkHandle C10dBackend::endCoalescing() {
  std::optional<Batch> batch;
  {
    std::lock_guard lock(batch_mutex_);
    batch.swap(batch_);
  }
  return run({c10d::OpType::COALESCED, "libddp:coalesced", {}}, {}, [&]() -> WorkPtr {
    if (!batch) C10dChecks(*group_, "endCoalescing").fail("no batch is open");
    std::vector<WorkPtr> works = std::move(batch->works);
    if (!batch->parts.empty()) {
      works.push_back(
          group_->exchange(std::move(batch->parts), call_options(c10d::kUnsetTimeout, true)));
    }
    if (works.empty()) return done("coalesced", {});
    return works.size() == 1 ? works[0] : all_of(works, {});
  });
}

}  // namespace libddp
