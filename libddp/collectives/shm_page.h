#pragma once

// The control page of a rank: what it tells its peers, in memory that all of them map.
//
//   failure | given up | event, mail event | beats | delay | call records | slots | inline payload
//   | staging in, out | per peer: messages (shm_messages.h)
//
// Every word has one writer, its rank (events excepted); stamps and counters only grow. The segment
// is sparse: parts that a group never uses cost no memory.
// Thread rule: a view of shared memory; the atomics order everything, see the members.
//
//   SharedSegment segment = ShmPage::create("world", 2);
//   ShmPage page(segment.data(), 2);
//   page.slot(barrier % 2).stamp.store(barrier, std::memory_order_release);

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "libddp/base/op_description.h"
#include "libddp/memory/shared_segment.h"

namespace libddp {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr int kMaxRanks = 128;

/// A rank sleeps on `notifications`; who made it wait notifies only if `sleepers` says that someone
/// sleeps.
struct alignas(128) FutexEvent {
  std::atomic<std::uint32_t> notifications;
  std::atomic<std::uint32_t> sleepers;
  /// Ranks that have left a collective by an exception; here, because who passes a barrier looks at
  /// this line anyway.
  std::atomic<std::uint32_t> num_given_up;
};

/// First failure of the rank; the text is complete before `is_set` is.
struct FailureRecord {
  static constexpr std::size_t kMaxText = 1000;
  std::atomic<std::uint32_t> is_set;
  std::uint32_t kind;
  std::int32_t peer_rank;
  std::int32_t peer_pid;
  char text[kMaxText];
};

/// What the rank called last; for messages only, so that a torn read is harmless.
struct alignas(128) CallRecord {
  static constexpr std::size_t kWords = (sizeof(OpDescription) + 7) / 8;
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> words[kWords];
};

/// Whom a rank waited for between the hosts in the collective that runs, for those of its host that
/// wait for it in the last stage; stored before the barrier of that stage.
struct DelayRecord {
  std::atomic<std::int64_t> rank;
  std::atomic<std::int64_t> ns;
};

/// What a rank shows at one barrier. Two alternate by the parity of the barrier: a rank that
/// writes one for barrier n+2 has seen everyone at n+1, so nobody reads what it held for n.
struct alignas(128) Slot {
  /// Where the rank's bytes are: an offset in its arena, or one of these.
  static constexpr std::uint64_t kStaged = ~std::uint64_t{0};
  static constexpr std::uint64_t kInline = ~std::uint64_t{1};
  static constexpr std::size_t kTinyBytes = 32;

  /// Number of the barrier; stored last, with release.
  std::atomic<std::uint64_t> stamp;
  std::uint64_t fingerprint;
  /// Input and output of the collective.
  std::uint64_t place[2];
  /// Payload that travels in the same cache line as the stamp.
  std::byte tiny[kTinyBytes];
};
static_assert(offsetof(Slot, tiny) + Slot::kTinyBytes == 64);

/// A message on its way; see shm_messages.h.
struct alignas(64) Envelope {
  static constexpr std::size_t kInlineBytes = 480;
  std::int32_t tag;
  std::int32_t unused;
  std::uint64_t bytes;
  /// Offset in the sender's arena, Slot::kInline or Slot::kStaged.
  std::uint64_t place;
  std::uint64_t unused_too;
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Envelope) == 512);

/// What a rank writes as the source of messages to one peer.
struct alignas(128) Outbox {
  static constexpr int kEnvelopes = 16;
  std::atomic<std::uint64_t> envelopes_posted;
  std::atomic<std::uint64_t> chunks_posted;
  std::atomic<std::uint64_t> acks_taken;
  Envelope envelopes[kEnvelopes];
};

/// What a rank writes as the target of messages from one peer.
struct alignas(128) Inbox {
  static constexpr int kAcks = 16;
  /// "Send the chunks of message m" or "message m is done".
  struct Ack {
    std::uint64_t message;
    std::uint64_t is_grant;
  };
  std::atomic<std::uint64_t> envelopes_taken;
  std::atomic<std::uint64_t> chunks_taken;
  std::atomic<std::uint64_t> acks_posted;
  Ack acks[kAcks];
};

class ShmPage {
 public:
  /// Payload of a small collective, per slot.
  static constexpr std::size_t kInlineBytes = 64u << 10;
  /// One of the two staging buffers of each direction.
  static constexpr std::size_t kStagingBytes = 4u << 20;
  /// One of the two chunk buffers of each mail channel.
  static constexpr std::size_t kMailChunkBytes = 1u << 20;

  /// Layout version and sizes, for comparison between ranks.
  static std::string layout();
  static std::size_t size_bytes(int world_size);
  static SharedSegment create(const std::string& group_name, int world_size);

  ShmPage() = default;
  ShmPage(std::byte* base, int world_size) : base_(base), world_size_(world_size) {}

  FailureRecord& failure() const;
  /// Number of the barrier that the rank had posted and did not pass; 0 = none.
  std::atomic<std::uint64_t>& given_up() const;
  /// Of rank 0's page: all ranks sleep on it in collectives.
  FutexEvent& event() const;
  /// The rank itself sleeps on it in send and recv.
  FutexEvent& mail_event() const;
  /// Number of calls recorded so far; the last is record((count - 1) % 2).
  std::atomic<std::uint64_t>& num_calls() const;
  /// Grows while the process runs: its heartbeat.
  std::atomic<std::uint64_t>& beats() const;
  DelayRecord& carried_delay() const;
  CallRecord& call(std::uint64_t parity) const;
  Slot& slot(std::uint64_t parity) const;
  std::byte* inline_payload(std::uint64_t parity) const;
  /// What peers read before the next barrier, and what they read after it.
  std::byte* staging_in(std::uint64_t parity) const;
  std::byte* staging_out(std::uint64_t parity) const;
  Outbox& outbox(int target) const;
  Inbox& inbox(int source) const;
  std::byte* mail_chunk(int target, std::uint64_t parity) const;

 private:
  std::byte* base_ = nullptr;
  int world_size_ = 0;
};

}  // namespace libddp
