#include "libddp/collectives/shm_core.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>

#include "libddp/base/cache_line.h"
#include "libddp/base/error.h"
#include "libddp/collectives/futex_event.h"

namespace libddp {
namespace {

struct SameCall {
  std::uint64_t fingerprint;
  std::vector<int> ranks;
};

// The ranks that have come, by what they called; the most ranks first, then by lowest rank.
std::vector<SameCall> by_call(const std::vector<Slot*>& slots, std::uint64_t barrier) {
  std::vector<SameCall> calls;
  for (std::size_t r = 0; r < slots.size(); ++r) {
    if (slots[r]->stamp.load(std::memory_order_acquire) != barrier) continue;
    const std::uint64_t fingerprint = slots[r]->fingerprint;
    auto call = std::find_if(calls.begin(), calls.end(),
                             [&](const SameCall& c) { return c.fingerprint == fingerprint; });
    if (call == calls.end()) call = calls.insert(call, SameCall{fingerprint, {}});
    call->ranks.push_back(static_cast<int>(r));
  }
  std::stable_sort(calls.begin(), calls.end(), [](const SameCall& a, const SameCall& b) {
    return a.ranks.size() > b.ranks.size();
  });
  return calls;
}

std::string ranks_text(const ShmPeers& peers, std::vector<int> ranks) {
  for (int& rank : ranks) rank = peers.group_rank(rank);
  return fmt::format("rank{} {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "));
}

}  // namespace

/// Everyone has posted barrier n.
class ShmCore::AllArrived final : public WaitCondition {
 public:
  explicit AllArrived(ShmCore& core)
      : core_(core), slots_(core.slots_[core.barrier_ & 1]), number_(core.barrier_) {}

  bool ready() override {
    while (next_ < slots_.size() && has_come(next_)) ++next_;
    return next_ == slots_.size();
  }
  std::vector<int> missing() const override {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < slots_.size(); ++r) {
      if (!has_come(r)) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }
  int blocker() const override { return next_ < slots_.size() ? static_cast<int>(next_) : -1; }
  /// A mismatch is told as soon as it is seen: the missing ranks may never come.
  void check() override {
    for (std::size_t r = 0; r < slots_.size(); ++r) {
      if (has_come(r) && slots_[r]->fingerprint != core_.fingerprint_) core_.report_mismatch();
    }
  }

 private:
  bool has_come(std::size_t rank) const {
    return slots_[rank]->stamp.load(std::memory_order_seq_cst) == number_;
  }

  ShmCore& core_;
  const std::vector<Slot*>& slots_;
  const std::uint64_t number_;
  std::size_t next_ = 0;
};

ShmCore::ShmCore(ShmCommOptions options)
    : peers_(std::move(options)),
      failure_(peers_),
      waiter_(peers_, failure_),
      rank_(peers_.rank()),
      world_size_(peers_.world_size()) {
  for (const ShmPage& page : peers_.pages()) {
    for (std::size_t parity : {0u, 1u}) {
      slots_[parity].push_back(&page.slot(parity));
      payloads_[parity].push_back(page.inline_payload(parity));
    }
  }
}

void ShmCore::begin(const CommCall& call, Stage stage) {
  failure_.throw_if_earlier(call);
  call_ = &call;
  waiter_.begin(stage == Stage::Last);
  fingerprint_ = call.description.fingerprint(call.sequence);
  peers_.record(call);
}

void ShmCore::barrier(std::uint64_t input_place, std::uint64_t output_place) {
  post(input_place, output_place);
  await_everyone();
}

void ShmCore::barrier_with_payload(std::size_t bytes) {
  post(Slot::kInline, Slot::kStaged);
  if (bytes > Slot::kTinyBytes) prefetch_payloads(bytes);
  await_everyone();
}

// The peers' payloads cross the machine beside their stamps instead of after them.
void ShmCore::prefetch_payloads(std::size_t bytes) const {
  constexpr std::size_t kMostBytes = 8 * kCacheLineBytes;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    const std::byte* payload = payload_at(r, barrier_, bytes);
    for (std::size_t at = 0; at < std::min(bytes, kMostBytes); at += kCacheLineBytes) {
      __builtin_prefetch(payload + at);
    }
  }
}

void ShmCore::post(std::uint64_t input_place, std::uint64_t output_place) {
  const std::uint64_t number = ++barrier_;
  Slot& mine = *slots_[number & 1][rank_];
  mine.fingerprint = fingerprint_;
  mine.place[0] = input_place;
  mine.place[1] = output_place;
  // See NOTE [Rings without a fence] in shm_waiter.cpp.
  mine.stamp.store(number,
                   policy().oversubscribed ? std::memory_order_seq_cst : std::memory_order_release);
}

void ShmCore::await_everyone() {
  try {
    AllArrived barrier(*this);
    if (!barrier.ready()) waiter_.wait(*call_, event(), barrier);
    for (const Slot* slot : slots_[barrier_ & 1]) {
      if (slot->fingerprint != fingerprint_) report_mismatch();
    }
    if (has_anyone_given_up()) throw_if_given_up();
  } catch (...) {
    show_given_up();
    throw;
  }
  // Whoever finds the barrier complete wakes those who sleep: the last one to come is among them.
  notify(event());
}

std::uint64_t ShmCore::place(int rank, int which) const {
  return slots_[barrier_ & 1][rank]->place[which];
}

bool ShmCore::all_in_arena(int which) const {
  for (int r = 0; r < world_size_; ++r) {
    if (place(r, which) >= Slot::kInline) return false;
  }
  return true;
}

bool ShmCore::none_in_arena(int which) const {
  for (int r = 0; r < world_size_; ++r) {
    if (place(r, which) < Slot::kInline) return false;
  }
  return true;
}

// See NOTE [Ranks that are late].
void ShmCore::show_given_up() noexcept {
  peers_.own_page().given_up().store(barrier_, std::memory_order_release);
  event().num_given_up.fetch_add(1, std::memory_order_seq_cst);
}

void ShmCore::throw_if_given_up() {
  for (int r = 0; r < world_size_; ++r) {
    const std::uint64_t barrier = peers_.page(r).given_up().load(std::memory_order_acquire);
    if (r != rank_ && barrier != 0 && barrier <= barrier_) throw_given_up();
  }
}

void ShmCore::throw_given_up() {
  failure_.throw_if_failed(call_);
  int culprit = 0;
  while (culprit + 1 < world_size_ && peers_.page(culprit).given_up().load() == 0) ++culprit;
  failure_.fail_and_throw(
      call_, {.kind = GroupFailure::Kind::Peer,
              .message = fmt::format("rank {} (pid {}) gave it up", peers_.group_rank(culprit),
                                     peers_.pid_of(culprit)),
              .peer_rank = peers_.group_rank(culprit),
              .peer_pid = peers_.pid_of(culprit)});
}

void ShmCore::report_mismatch() {
  // What a rank called before it gave up is still there: that it gave up is the reason.
  failure_.throw_if_failed(call_);
  const std::vector<SameCall> calls = by_call(slots_[barrier_ & 1], barrier_);
  std::vector<std::string> called;
  for (const SameCall& call : calls) {
    called.push_back(fmt::format("{} called {}", ranks_text(peers_, call.ranks),
                                 peers_.last_call_of(call.ranks.front())));
  }
  // Nobody is named as the peer: who is right is not known here.
  failure_.fail_and_throw(
      call_, {.kind = GroupFailure::Kind::Peer,
              .message = fmt::format(
                  "the ranks called different collectives: {}. Hint: every rank must make the "
                  "same calls in the same order, with equal shapes and dtypes",
                  fmt::join(called, ", "))});
}

}  // namespace libddp
