#include "libddp/snapshot/staged_targets.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace libddp {
namespace {

std::uintptr_t address_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

std::byte* StagedTargets::add(const at::Tensor& tensor) {
  if (tensor.nbytes() == 0) return nullptr;
  void* const data = tensor.mutable_data_ptr();
  std::uintptr_t begin = address_of(data);
  std::uintptr_t end = begin + tensor.nbytes();
  std::vector<at::Tensor> kept{tensor};
  auto each = targets_.lower_bound(end);
  while (each != targets_.begin()) {
    each = std::prev(each);
    const std::uintptr_t other_end = each->first + each->second.bytes.nbytes();
    if (other_end <= begin) break;
    begin = std::min(begin, each->first);
    end = std::max(end, other_end);
    kept.insert(kept.end(), each->second.kept.begin(), each->second.kept.end());
    each = targets_.erase(each);
  }
  at::Tensor bytes = DeviceLines::bytes_at(begin, end - begin, tensor.device());
  targets_[begin] = {std::move(kept), std::move(bytes)};
  return static_cast<std::byte*>(data);
}

void StagedTargets::begin() {
  for (auto& [address, target] : targets_) target.line = lines_.line_to(target.bytes.device());
}

const StagedTargets::Target* StagedTargets::find(const std::byte* to) const {
  auto behind = targets_.upper_bound(address_of(to));
  if (behind == targets_.begin()) return nullptr;
  const auto& [begin, target] = *--behind;
  return address_of(to) < begin + target.bytes.nbytes() ? &target : nullptr;
}

StagedTargets::Place& StagedTargets::place_at(const std::byte* data) {
  return *std::find_if(places_.begin(), places_.end(),
                       [&](const Place& place) { return place.data == data; });
}

std::byte* StagedTargets::take_place() {
  std::unique_lock lock(mutex_);
  if (places_.size() < DeviceLines::kPlaces) {
    return places_.emplace_back(lines_.make_place()).data;
  }
  changed_.wait(lock, [&] { return !idle_.empty(); });
  std::byte* const data = idle_.front();
  idle_.pop_front();
  const Place& place = place_at(data);
  lock.unlock();
  try {
    DeviceLines::wait(place);
  } catch (...) {
    give_back(data);
    throw;
  }
  return data;
}

void StagedTargets::send(std::byte* data, std::span<const Piece> pieces) {
  const std::lock_guard lock(mutex_);
  Place& place = place_at(data);
  for (const Piece& piece : pieces) {
    const Target& target = *find(piece.to);
    const auto bytes = static_cast<std::int64_t>(piece.bytes);
    const auto offset =
        static_cast<std::int64_t>(address_of(piece.to) - address_of(target.bytes.const_data_ptr()));
    const c10::StreamGuard beside(lines_.stream(target.line));
    target.bytes.narrow(0, offset, bytes)
        .copy_(place.memory.narrow(0, static_cast<std::int64_t>(piece.at), bytes),
               /*non_blocking=*/true);
  }
  lines_.record(place);
}

void StagedTargets::give_back(std::byte* data) noexcept {
  const std::lock_guard lock(mutex_);
  idle_.push_back(data);
  changed_.notify_one();
}

}  // namespace libddp
