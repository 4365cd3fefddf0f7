#pragma once

// While it lives, backward passes add up whole gradients on each rank; the next pass averages the
// sum. Thread rule: as its model.
//
//   { const auto guard = model.no_sync(); model.forward(a).sum().backward(); }
//   model.forward(b).sum().backward();

namespace libddp {

class ShardedModel;

class NoSync {
 public:
  explicit NoSync(ShardedModel& model);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  ShardedModel& model_;
  const bool before_;
};

}  // namespace libddp
