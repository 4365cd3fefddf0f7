#include "tests/fakegpu/access_log.h"

#include <pthread.h>

#include <algorithm>
#include <numeric>

namespace fakegpu {
namespace {

/// More are the same mistake over and over.
constexpr std::size_t kMaxRaces = 1000;

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

AccessLog& AccessLog::get() {
  static AccessLog& log = [&]() -> AccessLog& {
    auto* const made = new AccessLog;  // never freed: threads of streams outlive static objects
    ::pthread_atfork([] { get().lock(); }, [] { get().unlock(); }, [] { get().unlock(); });
    return *made;
  }();
  return log;
}

Clock& AccessLog::stream_clock(const DeviceStream& stream) { return streams_[stream.slot()]; }

Clock& AccessLog::thread_clock() {
  thread_local Clock clock;
  return clock;
}

const Clock& AccessLog::now(const DeviceStream& stream) {
  Clock& clock = stream_clock(stream);
  clock.join(hosts_.at(stream.device()));
  clock.join(thread_clock());
  return clock;
}

void AccessLog::launch(const DeviceStream& stream, const std::string& name,
                       const std::vector<ByteRange>& reads, const std::vector<ByteRange>& writes) {
  const std::lock_guard lock(mutex_);
  now(stream);
  Clock& clock = stream_clock(stream);
  const Operation operation{name, stream.stream(), ++last_operation_};
  ++num_operations_.at(stream.device());
  const std::uint64_t tick = clock.tick(stream.slot());
  for (const ByteRange& range : reads) note({range, false, stream.slot(), tick, operation}, clock);
  for (const ByteRange& range : writes) note({range, true, stream.slot(), tick, operation}, clock);
}

void AccessLog::note(const Access& access, const Clock& clock) {
  if (access.range.begin >= access.range.end) return;
  auto block = blocks_.upper_bound(access.range.begin);
  if (block == blocks_.begin()) return;
  --block;
  // Memory that nobody reported (pageable host memory) has no history.
  if (access.range.begin < block->first + block->second.bytes) note_in(block, access, clock);
}

void AccessLog::note_in(Blocks::iterator block, const Access& access, const Clock& clock) {
  std::vector<Access>& all = block->second.accesses;
  const auto is_over = [&](const Access& past) {
    const ByteRange both{std::max(past.range.begin, access.range.begin),
                         std::min(past.range.end, access.range.end)};
    if (both.begin >= both.end) return false;
    const bool is_ordered = past.tick <= clock.at(past.slot);
    const bool is_conflict = past.writes || access.writes;
    if (!is_ordered && is_conflict) {
      add(block, past, access.operation, both, false);
      return true;  // once
    }
    // Whoever is ordered behind this access is behind the past one too.
    const bool is_covered =
        access.range.begin <= past.range.begin && past.range.end <= access.range.end;
    return is_ordered && is_covered && (access.writes || !past.writes);
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_over), all.end());
  all.push_back(access);
}

void AccessLog::add(const Blocks::const_iterator& block, const Access& first,
                    const Operation& second, const ByteRange& range, bool is_freed) {
  if (races_.size() >= kMaxRaces) return;
  races_.push_back({first.operation, second, is_freed, reinterpret_cast<void*>(block->first),
                    block->second.bytes, range.begin - block->first, range.end - block->first});
}

void AccessLog::host_uses(const std::string& name, const std::vector<ByteRange>& reads,
                          const std::vector<ByteRange>& writes) {
  const std::lock_guard lock(mutex_);
  for (const ByteRange& range : reads) check_host(name, range, false);
  for (const ByteRange& range : writes) check_host(name, range, true);
}

void AccessLog::check_host(const std::string& name, const ByteRange& range, bool writes) {
  auto block = blocks_.upper_bound(range.begin);
  if (range.begin >= range.end || block == blocks_.begin()) return;
  --block;
  std::vector<Access>& all = block->second.accesses;
  const auto is_race = [&](const Access& past) {
    const ByteRange both{std::max(past.range.begin, range.begin),
                         std::min(past.range.end, range.end)};
    if (both.begin >= both.end || !(past.writes || writes)) return false;
    const c10::Stream& stream = past.operation.stream;
    Clock host = hosts_.at(static_cast<std::size_t>(stream.device_index()));
    host.join(thread_clock());
    if (past.tick <= host.at(past.slot)) return false;
    add(block, past, {name, stream, 0, /*is_of_host=*/true}, both, false);
    return true;  // once
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_race), all.end());
}

Clock AccessLog::record(const DeviceStream& stream) {
  const std::lock_guard lock(mutex_);
  return now(stream);
}

bool AccessLog::wait(const DeviceStream& stream, const Clock& event) {
  const std::lock_guard lock(mutex_);
  const std::int64_t of_device = ++num_waits_.at(stream.device());
  const std::int64_t number =
      ignored_device_ < 0 ? std::accumulate(num_waits_.begin(), num_waits_.end(), std::int64_t{0})
                          : of_device;
  const bool counts = ignored_device_ < 0 || ignored_device_ == stream.device();
  if (counts && ignored_ == number) return false;
  now(stream);
  if (!stream_clock(stream).join(event)) redundant_.at(stream.device()).push_back(of_device);
  return true;
}

void AccessLog::order(const DeviceStream& earlier, const DeviceStream& later) {
  const std::lock_guard lock(mutex_);
  const Clock known = now(earlier);
  stream_clock(later).join(known);
}

void AccessLog::thread_saw(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  thread_clock().join(clock);
  seen_.join(clock);
}

void AccessLog::host_waited(c10::DeviceIndex device, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  const std::int64_t number = ++num_host_waits_.at(device);
  if (ignored_host_wait_ == std::pair<std::int64_t, int>(number, device)) return;
  hosts_.at(device).join(clock);
  thread_clock().join(clock);
}

void AccessLog::host_waited(const DeviceStream& stream) {
  host_waited(stream.device(), record(stream));
}

void AccessLog::allocated(const void* block, std::size_t bytes, const DeviceStream* owner) {
  const std::lock_guard lock(mutex_);
  if (owner != nullptr) check_freed(*owner);
  Block& entry = blocks_[address(block)];
  entry.bytes = bytes;
  entry.owner = owner;
  entry.recorded.clear();
}

void AccessLog::freed(const void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address(block));
  if (found == blocks_.end() || found->second.owner == nullptr) return;
  Block& entry = found->second;
  const Clock& owner = now(*entry.owner);
  std::vector<Access>& all = entry.accesses;
  // The allocator waits for the streams that it was told of; and what some thread has seen to be
  // over uses no memory any more, whoever frees it.
  const auto is_over = [&](const Access& access) {
    return entry.recorded.count(access.slot) > 0 || access.tick <= seen_.at(access.slot);
  };
  all.erase(std::remove_if(all.begin(), all.end(), is_over), all.end());
  entry.is_freed_in_use = std::any_of(all.begin(), all.end(), [&](const Access& access) {
    return access.tick > owner.at(access.slot);
  });
  if (entry.is_freed_in_use) freed_in_use_.insert(found->first);
}

void AccessLog::check_freed(const DeviceStream& owner) {
  const Clock& clock = now(owner);
  for (auto it = freed_in_use_.begin(); it != freed_in_use_.end();) {
    const auto block = blocks_.find(*it);
    if (block->second.owner != &owner) {
      ++it;
      continue;
    }
    std::vector<Access>& all = block->second.accesses;
    const auto is_in_use = [&](const Access& access) {
      if (access.tick <= clock.at(access.slot)) return false;
      add(block, access, {"allocation", owner.stream(), 0}, access.range, true);
      return true;
    };
    all.erase(std::remove_if(all.begin(), all.end(), is_in_use), all.end());
    block->second.is_freed_in_use = false;
    it = freed_in_use_.erase(it);
  }
}

void AccessLog::freed_at_once(const void* block, const DeviceStream& any) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address(block));
  if (found == blocks_.end()) return;
  Clock host = hosts_.at(any.device());
  host.join(thread_clock());
  for (const Access& access : found->second.accesses) {
    if (access.tick > host.at(access.slot))
      add(found, access, {"free", any.stream(), 0}, access.range, true);
  }
  blocks_.erase(found);
}

void AccessLog::used_on(const void* block, const DeviceStream& stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address(block));
  if (found != blocks_.end()) found->second.recorded.insert(stream.slot());
}

void AccessLog::forget(const void* block) {
  const std::lock_guard lock(mutex_);
  freed_in_use_.erase(address(block));
  blocks_.erase(address(block));
}

std::vector<Race> AccessLog::take_races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

void AccessLog::reset() {
  const std::lock_guard lock(mutex_);
  for (auto& [base, block] : blocks_) {
    block.accesses.clear();
    block.is_freed_in_use = false;
  }
  freed_in_use_.clear();
  races_.clear();
  num_operations_ = {};
  num_host_waits_ = {};
  num_waits_ = {};
  redundant_ = {};
  ignored_.reset();
  ignored_host_wait_ = {0, -1};
}

void AccessLog::ignore_wait(std::int64_t k, int device) {
  const std::lock_guard lock(mutex_);
  ignored_ = k;
  ignored_device_ = device;
}

void AccessLog::ignore_host_wait(std::int64_t k, int device) {
  const std::lock_guard lock(mutex_);
  ignored_host_wait_ = {k, device};
}

std::int64_t AccessLog::num_waits(int device) {
  const std::lock_guard lock(mutex_);
  if (device >= 0) return num_waits_.at(static_cast<std::size_t>(device));
  return std::accumulate(num_waits_.begin(), num_waits_.end(), std::int64_t{0});
}

std::int64_t AccessLog::num_operations(int device) {
  const std::lock_guard lock(mutex_);
  return num_operations_.at(static_cast<std::size_t>(device));
}

std::int64_t AccessLog::num_host_waits(int device) {
  const std::lock_guard lock(mutex_);
  return num_host_waits_.at(static_cast<std::size_t>(device));
}

std::vector<std::int64_t> AccessLog::redundant_waits(int device) {
  const std::lock_guard lock(mutex_);
  return redundant_.at(static_cast<std::size_t>(device));
}

}  // namespace fakegpu
