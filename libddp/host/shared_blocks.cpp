#include "libddp/host/shared_blocks.h"

#include <atomic>
#include <new>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/process.h"

namespace libddp {
namespace {

using Holders = std::atomic<std::int64_t>;
static_assert(Holders::is_always_lock_free && sizeof(Holders) <= SharedBlocks::kHeadBytes);

Holders& holders_of(std::byte* head) { return *std::launder(reinterpret_cast<Holders*>(head)); }

}  // namespace

SharedBlocks::SharedBlocks(std::shared_ptr<Arena> arena, std::shared_ptr<const void> mappings)
    : arena_(std::move(arena)), mappings_(std::move(mappings)) {}

SharedBlocks::~SharedBlocks() {
  drop_unheld();
  for (std::shared_ptr<std::byte>& block : made_) Arena::leave_to_peers(std::move(block));
}

std::uint64_t SharedBlocks::make(std::size_t bytes, int num_holders) {
  const std::lock_guard lock(mutex_);
  drop_unheld();
  std::shared_ptr<std::byte> block = arena_->allocate(kHeadBytes + bytes);
  new (block.get()) Holders(num_holders);
  const auto offset = arena_->offset_of(block.get(), kHeadBytes + bytes);
  LIBDDP_CHECK(offset.has_value(), "a block lies outside its arena");
  made_.push_back(std::move(block));
  return *offset;
}

std::shared_ptr<std::byte> SharedBlocks::hold(std::byte* head) {
  // A child of fork() has copies of the pointers, but is no holder.
  const auto let_go = [self = shared_from_this(), head, made = ProcessStamp()](std::byte*) {
    if (made.is_current()) holders_of(head).fetch_sub(1, std::memory_order_acq_rel);
  };
  return {head + kHeadBytes, let_go};
}

void SharedBlocks::drop_unheld() {
  std::erase_if(made_, [](const std::shared_ptr<std::byte>& block) {
    return holders_of(block.get()).load(std::memory_order_acquire) == 0;
  });
}

}  // namespace libddp
