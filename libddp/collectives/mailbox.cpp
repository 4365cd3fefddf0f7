#include "libddp/collectives/mailbox.h"

#include <algorithm>

namespace libddp {

/// Every part has ended; looking moves bytes.
class Mailbox::AllDone final : public WaitCondition {
 public:
  explicit AllDone(Mailbox& mail) : mail_(mail) {}

  bool ready() override {
    while (mail_.poll()) {
    }
    return std::all_of(mail_.parts_->begin(), mail_.parts_->end(),
                       [](const Transfer* part) { return part->is_done; });
  }
  std::vector<int> missing() const override {
    std::vector<int> ranks;
    for (const Transfer* part : *mail_.parts_) {
      if (part->is_done) continue;
      const int rank = part->source >= 0 ? part->source : part->peer;
      if (rank < 0) return {};
      const int peer = mail_.core_.index_of(rank);
      if (std::find(ranks.begin(), ranks.end(), peer) == ranks.end()) ranks.push_back(peer);
    }
    return ranks;
  }

 private:
  Mailbox& mail_;
};

Mailbox::Mailbox(ShmCore& core) : core_(core), channels_(core.world_size()) {}

void Mailbox::run(const CommCall& call, std::span<Transfer> parts) {
  core_.throw_if_failed(&call);
  run_parts_.clear();
  for (Transfer& part : parts) run_parts_.push_back(&part);
  parts_ = &run_parts_;
  forget_missing_parts();
  AllDone done(*this);
  if (!done.ready()) core_.wait(call, core_.page(core_.rank()).mail_event(), done);
}

bool Mailbox::progress(const std::vector<Transfer*>& parts) {
  parts_ = &parts;
  forget_missing_parts();
  bool moved = false;
  while (poll()) moved = true;
  return moved;
}

// A part that its owner has given up may be gone: nothing here may point to it any more.
void Mailbox::forget_missing_parts() {
  for (Channel& channel : channels_) {
    if (channel.streaming && !knows(channel.streaming)) channel.streaming = nullptr;
    std::erase_if(channel.receiving, [&](const Transfer* part) { return !knows(part); });
    for (PendingAck& pending : channel.acks) {
      if (pending.finishes && !knows(pending.finishes)) pending.finishes = nullptr;
    }
  }
}

bool Mailbox::knows(const Transfer* part) const {
  return std::find(parts_->begin(), parts_->end(), part) != parts_->end();
}

bool Mailbox::poll() {
  bool moved = false;
  for (int peer = 0; peer < core_.world_size(); ++peer) moved |= take_envelopes(peer);
  moved |= match_unexpected();
  moved |= post_envelopes();
  for (int peer = 0; peer < core_.world_size(); ++peer) {
    moved |= receive_chunks(peer);
    moved |= post_acks(peer);
    moved |= take_acks(peer);
    moved |= send_chunks(peer);
  }
  return moved;
}

std::uint32_t Mailbox::ticket() const {
  return core_.page(core_.rank()).mail_event().notifications.load(std::memory_order_seq_cst);
}

void Mailbox::wait(std::uint32_t old_ticket, std::chrono::nanoseconds limit) {
  for (int i = 0; i < core_.policy().spins; ++i) {
    if (ticket() != old_ticket) return;
    relax_cpu();
  }
  Sleeper(core_.page(core_.rank()).mail_event(), old_ticket).sleep(limit);
}

void Mailbox::wake_own() noexcept { notify_always(core_.page(core_.rank()).mail_event()); }

}  // namespace libddp
