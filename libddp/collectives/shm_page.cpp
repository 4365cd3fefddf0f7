#include "libddp/collectives/shm_page.h"

#include <fmt/format.h>

namespace libddp {
namespace {

constexpr int kLayoutVersion = 4;
constexpr std::size_t kBlock = 4096;

constexpr std::size_t blocks(std::size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

/// The fixed part at the start of the page. Zeros are its valid first state.
struct Head {
  FailureRecord failure;
  std::atomic<std::uint64_t> given_up;
  FutexEvent event;
  FutexEvent mail_event;
  alignas(128) std::atomic<std::uint64_t> num_calls;
  alignas(128) std::atomic<std::uint64_t> beats;
  alignas(128) DelayRecord carried_delay;
  CallRecord calls[2];
  Slot slots[2];
};

constexpr std::size_t kPayloadAt = blocks(sizeof(Head));
// Staging on huge pages: the segment starts on one.
constexpr std::size_t kStagingAt = 2u << 20;
constexpr std::size_t kMailAt = kStagingAt + 4 * ShmPage::kStagingBytes;
constexpr std::size_t kMailBoxes = blocks(sizeof(Outbox)) + blocks(sizeof(Inbox));
static_assert(kPayloadAt + 2 * ShmPage::kInlineBytes <= kStagingAt);

Head& head(std::byte* base) { return *reinterpret_cast<Head*>(base); }

std::byte* mail(std::byte* base, int peer) { return base + kMailAt + peer * kMailBoxes; }

}  // namespace

std::string ShmPage::layout() {
  return fmt::format("page {} slots {} inline {} staging {} mail {}x{} chunk {}", kLayoutVersion,
                     sizeof(Head), kInlineBytes, kStagingBytes, Outbox::kEnvelopes,
                     sizeof(Envelope), kMailChunkBytes);
}

std::size_t ShmPage::size_bytes(int world_size) {
  const std::size_t per_peer = kMailBoxes + 2 * kMailChunkBytes;
  return kMailAt + static_cast<std::size_t>(world_size) * per_peer;
}

SharedSegment ShmPage::create(const std::string& group_name, int world_size) {
  return SharedSegment::create("libddp-page-" + group_name, size_bytes(world_size));
}

FailureRecord& ShmPage::failure() const { return head(base_).failure; }

std::atomic<std::uint64_t>& ShmPage::given_up() const { return head(base_).given_up; }

FutexEvent& ShmPage::event() const { return head(base_).event; }

FutexEvent& ShmPage::mail_event() const { return head(base_).mail_event; }

std::atomic<std::uint64_t>& ShmPage::num_calls() const { return head(base_).num_calls; }

std::atomic<std::uint64_t>& ShmPage::beats() const { return head(base_).beats; }

DelayRecord& ShmPage::carried_delay() const { return head(base_).carried_delay; }

CallRecord& ShmPage::call(std::uint64_t parity) const { return head(base_).calls[parity & 1]; }

Slot& ShmPage::slot(std::uint64_t parity) const { return head(base_).slots[parity & 1]; }

std::byte* ShmPage::inline_payload(std::uint64_t parity) const {
  return base_ + kPayloadAt + (parity & 1) * kInlineBytes;
}

std::byte* ShmPage::staging_in(std::uint64_t parity) const {
  return base_ + kStagingAt + (parity & 1) * kStagingBytes;
}

std::byte* ShmPage::staging_out(std::uint64_t parity) const {
  return base_ + kStagingAt + (2 + (parity & 1)) * kStagingBytes;
}

Outbox& ShmPage::outbox(int target) const {
  return *reinterpret_cast<Outbox*>(mail(base_, target));
}

Inbox& ShmPage::inbox(int source) const {
  return *reinterpret_cast<Inbox*>(mail(base_, source) + blocks(sizeof(Outbox)));
}

std::byte* ShmPage::mail_chunk(int target, std::uint64_t parity) const {
  std::byte* chunks = base_ + kMailAt + static_cast<std::size_t>(world_size_) * kMailBoxes;
  return chunks + (2 * static_cast<std::size_t>(target) + (parity & 1)) * kMailChunkBytes;
}

}  // namespace libddp
