#pragma once

// Which gradients lie in which bucket: first in the reverse order of the parameters, then, once,
// in the order in which rank 0's gradients have fired in the first pass that synchronised. For a
// communication hook they are torch's, see torch_bucket_plan.h.
//
// With a static graph that pass tells besides how often each gradient fires.
// Thread rule: as Reducer.
//
//   BucketOrder order(sizes_of(parameters), limits, sparse_indices);
//   build(order.first_plan());
//   order.record(index);                                  // in each gradient's hook
//   if (order.is_learning()) order.learn(group, buckets.plan());
//   if (order.has_plan()) build(order.take_plan());       // from the next forward on

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libddp/ddp/bucket_plan.h"
#include "libddp/group/process_group.h"

namespace libddp {

class BucketOrder {
 public:
  /// `without_bucket`: indices of parameters that have none.
  BucketOrder(std::vector<ParameterSize> sizes, BucketLimits limits,
              std::vector<std::size_t> without_bucket);

  const std::vector<ParameterSize>& sizes() const { return sizes_; }
  /// Until the first pass has ended.
  bool is_learning() const { return is_learning_; }
  BucketPlan first_plan() const;
  /// Whether the buckets are torch's.
  bool is_torchs() const { return is_torchs_; }
  /// From now on they are. `begins_whole`: until the order is known, one per dtype.
  void follow_torch(bool begins_whole) {
    is_torchs_ = true;
    begins_whole_ = begins_whole;
  }

  /// A gradient has fired.
  void record(std::size_t index) {
    if (is_learning_) fired_.push_back(index);
  }
  /// Another pass begins.
  void forget_fired() { fired_.clear(); }
  /// Learns from the pass that ends; a collective. There is a new plan where it is not `present`.
  void learn(ProcessGroup& group, const BucketPlan& present);
  /// Instead of learning: the present order stays.
  void keep() {
    is_learning_ = false;
    is_kept_ = true;
    fired_ = {};
  }
  /// Whether the buckets are in the order that was learned.
  bool is_learned() const { return !is_learning_ && !is_kept_ && !has_plan(); }
  bool has_plan() const { return planned_.has_value(); }
  /// REQUIRES has_plan.
  BucketPlan take_plan();
  /// Parameters have other sizes now: learns anew.
  void restart(std::vector<ParameterSize> sizes);

  /// How often each gradient fires in a pass.
  const std::vector<std::uint32_t>& num_expected() const { return num_expected_; }
  std::uint32_t num_expected(std::size_t index) const { return num_expected_[index]; }
  /// Throws StateError: one has fired more often than expected, after its bucket had been sent.
  [[noreturn]] void refuse_second_gradient(std::size_t index, const std::string& where,
                                           const std::string& name) const;
  /// Not known: nothing is complete before the end of the pass.
  void expect_unknown();
  void expect(std::vector<std::uint32_t> counts) { num_expected_ = std::move(counts); }

 private:
  std::vector<std::size_t> with_bucket(std::vector<std::size_t> order) const;
  BucketPlan plan_of(const std::vector<std::size_t>& order) const;
  std::vector<std::size_t> agreed_order(ProcessGroup& group);

  std::vector<ParameterSize> sizes_;
  const BucketLimits limits_;
  const std::vector<std::size_t> without_bucket_;
  bool is_torchs_ = false;
  bool begins_whole_ = false;
  bool is_learning_ = true;
  bool is_kept_ = false;
  std::vector<std::size_t> fired_;
  std::optional<BucketPlan> planned_;
  std::vector<std::uint32_t> num_expected_;
};

}  // namespace libddp
