#pragma once

// This rank's copy of a model under DistributedDataParallel: what the C++ and the Python class have
// in common. Checks at start that all ranks wrap the same model, makes all of them start from rank
// 0's values, broadcasts buffers, and owns the Reducer. It may go on in another group.
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
//
//   ReplicatedModel replica(parameters, buffers, group, {});
//   replica.broadcast(buffer_tensors);      // before a forward, where it is due
//   auto y = net->forward(x);
//   bool synchronises = replica.after_forward({y}, true);

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "libddp/ddp/options.h"
#include "libddp/group/process_group.h"
#include "libddp/module/broadcast_tensors.h"
#include "libddp/module/named_tensor.h"

namespace c10d {
class CommHookInterface;
}

namespace libddp {

class DelayedGradients;
class GradientBuckets;
class LowPrecisionParameters;
class PassTimeline;
class Reducer;
struct BucketLayout;

class ReplicatedModel {
 public:
  using Rethrow = std::function<void(std::exception_ptr)>;

  /// Collective if options.init_sync. `parameters`: all of them, frozen ones too.
  /// `delayed`: further parameters, averaged apart from them (see DelayedGradients).
  /// Throws ArgumentError where no parameter requires a gradient, where they are not on one device,
  /// where options.sparse_parameters has a name that `parameters` lacks, and where the ranks wrap
  /// different models.
  ReplicatedModel(NamedTensors parameters, const NamedTensors& buffers, Group group,
                  const DistributedDataParallelOptions& options, Rethrow rethrow = nullptr,
                  DelayedParameters delayed = {});

  /// Goes on in `group`, whatever has become of the group before: with the same parameters, hook,
  /// declared static graph and way to end passes. A collective of `group`, the one that the
  /// constructor is: some ranks may make their model instead, with the same `options`. Gradients
  /// are dropped. Parameters that were trained and are frozen now stay so. Not during a backward
  /// pass. Throws what the constructor throws; then it can do nothing but rejoin.
  void rejoin(Group group, const NamedTensors& buffers,
              const DistributedDataParallelOptions& options);
  /// False from the moment on that the model leaves the group that it is in now.
  std::shared_ptr<const bool> membership() const { return is_member_; }

  /// Collective: every rank gets the values of `root` (buffers before a forward, or the model).
  void broadcast(const std::vector<at::Tensor>& tensors, int root = 0);

  /// Before each forward. Follows parameters that have changed their dtype since the last one. With
  /// mixed precision, parameters show the low precision from here on.
  void before_forward();
  /// After a forward that threw. With mixed precision: takes `before_forward` back. If its backward
  /// would have synchronised (`sync`, and gradients are recorded), the other ranks wait for this
  /// one: they are told `what` (ProcessGroup::report_error).
  void forward_failed(const std::string& what, bool sync);
  /// After a backward pass that threw, of this model or not: see Reducer::backward_failed.
  bool backward_failed(const std::string& what);
  /// After a forward that returned `outputs`. Returns whether its backward synchronises: it does
  /// if `sync` and gradients are recorded, and nothing is done in it where all parameters are
  /// frozen for a while (the discriminator in a generator's step). Throws ArgumentError naming a
  /// parameter whose shape or dtype is not what was wrapped, or that has been unfrozen since.
  bool after_forward(const std::vector<at::Tensor>& outputs, bool sync);

  /// Whether `after_forward` wants to know the outputs.
  bool wants_outputs(bool sync) const;

  /// For an optimizer that shares the work: Reducer::shard. Throws ArgumentError with mixed
  /// precision and with delayed parameters.
  void shard(bool averages);

  /// Each bucket goes to `hook` instead of being averaged (compress_hook.h, or one's own), on all
  /// ranks, before the first backward pass. Throws ArgumentError, StateError.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  void set_static_graph();
  /// If `manual`, each synchronising backward is followed by one call of
  /// finalize_backward_manual().
  void set_manual_finalization(bool manual);
  void finalize_backward_manual();

  /// The trained parameters, those of `buckets`; `layout` in words: to_string (bucket_layout.h).
  const NamedTensors& trained_parameters() const;
  std::shared_ptr<const GradientBuckets> buckets() const;
  const BucketLayout& layout() const;
  const PassTimeline& timeline() const;
  /// Throws StateError where the last rejoin has failed.
  Reducer& reducer() const;
  const Group& group() const { return group_; }

 private:
  void join(const NamedTensors& buffers, const DistributedDataParallelOptions& options);
  void leave();
  void restore_dtypes(const NamedTensors& buffers);
  /// Parameters that were trained when they were wrapped.
  std::vector<at::Tensor> frozen_since() const;
  static void check_parameters(const NamedTensors& parameters);
  void check_sparse_names(const std::vector<std::string>& names) const;
  /// Returns whether some parameter requires a gradient now.
  bool check_unchanged() const;
  [[noreturn]] void refuse_change(std::size_t index, const std::string& was, const std::string& is,
                                  const char* hint) const;
  void follow_dtypes();
  bool trains_anything() const;
  void make_reducer(const DistributedDataParallelOptions& options);
  void apply(const MixedPrecision& precision, const NamedTensors& buffers);
  void raise_low();
  void raise_after_backward(const std::vector<at::Tensor>& outputs);

  /// What a parameter was like when it was wrapped; the buckets are made for that.
  struct Wrapped {
    bool requires_grad;
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
  };

  const NamedTensors parameters_;
  const Rethrow rethrow_;
  const DelayedParameters delayed_parameters_;
  Group group_;
  std::shared_ptr<bool> is_member_;
  std::vector<Wrapped> wrapped_;
  /// Of the buffers, by name.
  std::unordered_map<std::string, at::ScalarType> buffer_dtypes_;
  /// set_static_graph has been called.
  bool has_declared_static_graph_ = false;
  bool finalizes_manually_ = false;
  TensorBroadcaster broadcaster_;
  /// Null without mixed precision; shared with callbacks of passes in flight.
  std::shared_ptr<LowPrecisionParameters> low_;
  /// Whether the forward in progress has lowered them.
  bool lowered_here_ = false;
  /// See call_before_backward.
  std::shared_ptr<void> output_leaves_;
  std::shared_ptr<DelayedGradients> delayed_;
  /// Null between two groups.
  std::shared_ptr<Reducer> reducer_;
  /// That of the group before, until it has its place again.
  std::shared_ptr<c10d::CommHookInterface> hook_;
};

}  // namespace libddp
