#include "libddp/memory/arena.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/base/process.h"
#include "libddp/base/system_error.h"
#include "libddp/memory/child_mappings.h"
#include "libddp/memory/empty_cache.h"
#include "libddp/memory/free_list.h"
#include "libddp/memory/prefault.h"

namespace libddp {

/// What empty_cache sees of an arena; named, because a type of the header derives from it.
class ArenaCache {
 public:
  virtual ~ArenaCache() = default;
  virtual void empty() = 0;
};

namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kLargeBytes = 2u << 20;
// Freed memory that stays resident: what a training step frees and takes again is not worth a
// round trip through the kernel, which would clear every page.
constexpr std::uint64_t kKeptBytes = 256u << 20;
// What empty_cache leaves alone: a call into the kernel would cost more than it brings.
constexpr std::uint64_t kSmallBlockBytes = 64u << 10;
// All segments of a group fit well into the 128 TiB of a process, several groups included.
constexpr std::uint64_t kGroupAddressSpace = std::uint64_t{16} << 40;
constexpr std::uint64_t kSmallestReserve = 64u << 20;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::uint64_t soft_limit(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0) return RLIM_INFINITY;
  return limit.rlim_cur;
}

/// The arenas that this process has made.
class Caches {
 public:
  /// A child of fork() starts with none, and with a lock that no thread of the parent holds.
  static Caches& of_this_process() {
    static std::atomic<Caches*> instance{nullptr};
    Caches* found = instance.load(std::memory_order_acquire);
    while (found == nullptr || !found->made_.is_current()) {
      auto* const fresh = new Caches(found);  // never freed: the last tensors may outlive statics
      if (instance.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
      delete fresh;
    }
    return *found;
  }

  void add(const std::shared_ptr<ArenaCache>& cache) {
    const std::lock_guard lock(mutex_);
    std::erase_if(caches_, [](const std::weak_ptr<ArenaCache>& one) { return one.expired(); });
    caches_.push_back(cache);
  }

  void empty() {
    std::vector<std::shared_ptr<ArenaCache>> alive;
    {
      const std::lock_guard lock(mutex_);
      for (const std::weak_ptr<ArenaCache>& one : caches_) {
        if (auto cache = one.lock()) alive.push_back(std::move(cache));
      }
    }
    for (const auto& cache : alive) cache->empty();
  }

 private:
  explicit Caches(Caches* parents) : parents_(parents) {}

  const ProcessStamp made_;
  [[maybe_unused]] Caches* const parents_;  // so that it counts as reachable
  std::mutex mutex_;
  std::vector<std::weak_ptr<ArenaCache>> caches_;
};

}  // namespace

void empty_cache() { Caches::of_this_process().empty(); }

// NOTE [Warm and cold]
// Free offsets stand in two lists. Warm ones were used before and their pages are resident: they
// are handed out first. Cold ones were never touched or were given back to the kernel. When more
// than kKeptBytes are warm, the surplus has its pages punched out of the memfd and turns cold;
// empty_cache does that to all of them.
//
// NOTE [What peers may still write]
// The owner of a block knows that it does not need the bytes any more; whether a peer does is only
// known where a collective has ended, which it does by a barrier of all. Blocks that were free
// before a group's failure are therefore nobody's. What is freed after it may have been in the
// collective that failed, and is in neither list: the pages go when the segment does.
struct Arena::State : ArenaCache {
  State(const std::string& group, std::size_t reserve_bytes)
      : group_name(group),
        segment(
            SharedSegment::create("libddp-arena-" + group,
                                  round_up(std::max<std::size_t>(reserve_bytes, 1), kPageBytes))) {
    make_private_in_children(segment);
    cold.give(0, segment.size_bytes());
  }

  struct Taken {
    std::uint64_t offset = 0;
    bool is_cold = false;
  };

  Taken take(std::uint64_t size, std::uint64_t alignment);
  void give_back(std::uint64_t offset, std::uint64_t size, bool is_left = false) noexcept;
  void cool_surplus(std::unique_lock<std::mutex>& lock);
  void empty() override;
  void cool(FreeList::Range range, std::unique_lock<std::mutex>& lock);
  void punch(FreeList::Range range);
  [[noreturn]] void throw_used_up(std::uint64_t size) const;
  void require_owner(const char* call) const;

  const std::string group_name;
  const SharedSegment segment;
  const ProcessStamp made;
  mutable std::mutex mutex;
  FreeList warm;
  FreeList cold;
  std::uint64_t used_bytes = 0;
  std::atomic<bool> keeps_freed{false};
};

/// The deleter of a block.
struct Arena::Freeing {
  std::shared_ptr<State> state;
  std::shared_ptr<PrefaultJob> job;
  std::uint64_t size = 0;
  bool is_left = false;

  void operator()(std::byte* freed) const {
    if (job) job->cancel();
    state->give_back(static_cast<std::uint64_t>(freed - state->segment.data()), size, is_left);
  }
};

Arena::State::Taken Arena::State::take(std::uint64_t size, std::uint64_t alignment) {
  const std::lock_guard lock(mutex);
  std::optional<std::uint64_t> offset = warm.take(size, alignment);
  const bool is_cold = !offset;
  if (!offset) offset = cold.take(size, alignment);
  if (!offset) {
    // Free space may be cut into warm and cold neighbours: make it one.
    while (std::optional<FreeList::Range> range = warm.take_largest()) {
      punch(*range);
      cold.give(range->offset, range->size);
    }
    offset = cold.take(size, alignment);
  }
  if (!offset) throw_used_up(size);
  used_bytes += size;
  return {*offset, is_cold};
}

void Arena::State::throw_used_up(std::uint64_t size) const {
  throw Error(fmt::format(
      "libddp[group {}] arena: cannot allocate {} bytes: {} of {} reserved bytes are in use, the "
      "largest free range has {}. Hint: free tensors of this group, or reserve more.",
      group_name, size, used_bytes, segment.size_bytes(), cold.largest()));
}

// The lists of a child of fork() would hand out what the parent hands out too, and the lock may be
// held by a thread that exists only in the parent.
void Arena::State::require_owner(const char* call) const {
  if (made.is_current()) return;
  throw StateError(fmt::format(
      "libddp[group {}] arena: {} in a child of fork(): the memory belongs to the parent process. "
      "Hint: initialise the group after the fork, or use it only in the parent.",
      group_name, call));
}

// Runs in the deleter of a block, where nothing may be thrown.
void Arena::State::give_back(std::uint64_t offset, std::uint64_t size, bool is_left) noexcept {
  // In a child of fork() the memory is still the parent's, and the lock may be held by one of the
  // parent's threads.
  if (!made.is_current()) return;
  try {
    std::unique_lock lock(mutex);
    used_bytes -= size;
    if (is_left || keeps_freed.load(std::memory_order_acquire)) return;
    warm.give(offset, size);
    cool_surplus(lock);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "arena_range_lost",
        {{"group", group_name}, {"offset", offset}, {"bytes", size}, {"reason", error.what()}});
  }
}

void Arena::State::cool_surplus(std::unique_lock<std::mutex>& lock) {
  while (warm.free_size() > kKeptBytes) {
    const std::uint64_t surplus = round_up(warm.free_size() - kKeptBytes, kLargeBytes);
    FreeList::Range range = *warm.take_largest();
    if (range.size > surplus) {
      const std::uint64_t kept = range.size - surplus;
      warm.give(range.offset, kept);
      range = {range.offset + kept, surplus};
    }
    cool(range, lock);
  }
}

void Arena::State::empty() {
  std::unique_lock lock(mutex);
  while (warm.largest() >= kSmallBlockBytes) cool(*warm.take_largest(), lock);
}

// REQUIRES: the range is in neither list, so nobody can take it while the kernel works.
void Arena::State::cool(FreeList::Range range, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  punch(range);
  lock.lock();
  cold.give(range.offset, range.size);
}

void Arena::State::punch(FreeList::Range range) {
  const std::uint64_t begin = round_up(range.offset, kPageBytes);
  const std::uint64_t end = (range.offset + range.size) / kPageBytes * kPageBytes;
  if (begin >= end) return;
  while (::fallocate(segment.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(begin), static_cast<off_t>(end - begin)) != 0) {
    if (errno == EINTR) continue;
    // The memory stays usable, it only stays resident too.
    log(LogLevel::Warn, "arena_punch_failed",
        {{"group", group_name},
         {"bytes", end - begin},
         {"reason", errno_text("fallocate", errno)}});
    return;
  }
}

std::size_t Arena::default_reserve_bytes(int world_size) {
  const auto num_ranks = static_cast<std::uint64_t>(std::max(world_size, 1));
  const std::uint64_t memory = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                               static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t reserve = std::min(memory, kGroupAddressSpace / num_ranks);
  // Limits set by the user: every rank maps all segments of the group, and half of the space is
  // left to everything else.
  if (const std::uint64_t space = soft_limit(RLIMIT_AS); space != RLIM_INFINITY) {
    reserve = std::min(reserve, space / 2 / num_ranks);
  }
  reserve = std::min(reserve, soft_limit(RLIMIT_FSIZE));
  return std::max(reserve / kLargeBytes * kLargeBytes, kSmallestReserve);
}

Arena::Arena(std::shared_ptr<State> state) : state_(std::move(state)) {}

Arena::~Arena() = default;

std::shared_ptr<Arena> Arena::create(const std::string& group_name, std::size_t reserve_bytes) {
  auto state = std::make_shared<State>(group_name, reserve_bytes);
  Caches::of_this_process().add(state);
  return std::shared_ptr<Arena>(new Arena(std::move(state)));
}

std::shared_ptr<std::byte> Arena::allocate(std::size_t size_bytes) {
  state_->require_owner("allocate");
  if (size_bytes > state_->segment.size_bytes()) {
    const std::lock_guard lock(state_->mutex);
    state_->throw_used_up(size_bytes);
  }
  // Large blocks are whole pages on huge-page boundaries, so that freeing one frees its pages.
  const bool is_large = size_bytes >= kLargeBytes;
  const std::uint64_t size =
      round_up(std::max<std::size_t>(size_bytes, 1), is_large ? kPageBytes : kAlignment);
  const auto [offset, is_cold] = state_->take(size, is_large ? kLargeBytes : kAlignment);
  std::byte* data = state_->segment.data() + offset;
  std::shared_ptr<PrefaultJob> job;
  try {
    if (is_large && is_cold) job = prefault(data, size);
  } catch (...) {
    state_->give_back(offset, size);
    throw;
  }
  // If this allocation of the control block fails, shared_ptr runs the deleter.
  return std::shared_ptr<std::byte>(data, Freeing{state_, std::move(job), size});
}

void Arena::leave_to_peers(std::shared_ptr<std::byte> block) noexcept {
  if (auto* const freeing = std::get_deleter<Freeing>(block)) freeing->is_left = true;
}

void Arena::keep_freed() noexcept { state_->keeps_freed.store(true, std::memory_order_release); }

std::optional<std::uint64_t> Arena::offset_of(const void* pointer,
                                              std::size_t size_bytes) const noexcept {
  // Integers: comparing pointers into different objects is undefined.
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto begin = reinterpret_cast<std::uintptr_t>(state_->segment.data());
  const std::size_t total = state_->segment.size_bytes();
  if (address < begin || address - begin > total || size_bytes > total - (address - begin)) {
    return std::nullopt;
  }
  return address - begin;
}

std::size_t Arena::used_bytes() const {
  state_->require_owner("used_bytes");
  const std::lock_guard lock(state_->mutex);
  return state_->used_bytes;
}

const SharedSegment& Arena::segment() const { return state_->segment; }

}  // namespace libddp
