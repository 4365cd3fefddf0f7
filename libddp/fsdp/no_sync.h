#pragma once

// While it lives, backward passes add up whole gradients on each rank; the next pass averages the
// sum. Thread rule: as its model.
//
//   { const auto guard = model.no_sync(); model.forward(a).sum().backward(); }
//   model.forward(b).sum().backward();
//
//   std::optional<libddp::NoSync> guard;
//   if (!is_last) guard.emplace(model.no_sync());

#include <utility>

namespace libddp {

class ShardedModel;

class NoSync {
 public:
  explicit NoSync(ShardedModel& model);
  ~NoSync();
  NoSync(NoSync&& other) noexcept
      : model_(std::exchange(other.model_, nullptr)), before_(other.before_) {}
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  NoSync& operator=(NoSync&&) = delete;

 private:
  /// Null in one that was moved from.
  ShardedModel* model_;
  const bool before_;
};

}  // namespace libddp
