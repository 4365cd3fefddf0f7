#pragma once

// ZeRO-1: the parameters of a model whose buckets have blocks (Reducer::shard), and numbers that
// an optimizer keeps for each of their elements. Every rank updates what it owns and has the state
// of that only.
//
// The arrays have the layout of the buckets: element for element, a parameter lies where its
// gradient does, and a rank owns one block of each array. So what a rank owns of neighbours is one
// piece of memory in all of them.
// Where all ranks are on one host, each array exists once, in memory that all of them map: an
// update is there for the others after a barrier, and so is the state. Between hosts, and on
// devices, every rank has all parameters and its own blocks of the state; blocks of parameters are
// gathered in place after an update. On devices all of that is in the order of streams; the host
// waits in the construction only.
//
// NOTE [Two barriers per update]
// Between begin_update and publish, shared parameters are half updated. begin_update waits until
// every rank is there, so nobody computes with them any more, not even for an evaluation of its own
// after the backward pass; publish waits until every rank is done.
//
// NOTE [Each rank's own changes]
// A script may change parameters in place, on every rank (decoupled decay, weights swapped in and
// out for an evaluation, clipping): each rank then expects its change, once. So what a parameter
// shows is a private view of the shared array: a page that a rank writes to becomes that rank's.
// begin_update takes the owner's bytes of such pages into the array, publish drops the copies. As
// between hosts, the owner's value is what counts at an update. Memory that a rank has for itself
// is that of the pages that it has changed since the last one.
//
// Thread rule: one thread at a time. Collectives: construction, begin_update, publish, and
// ShardedNumbers::whole between hosts and on devices.
//
//   replica.shard(/*averages=*/false);                     // ReplicatedModel
//   ShardedParameters sharded(replica.trained_parameters(), group, replica.buckets());
//   sharded.begin_update();
//   for (std::size_t i = 0; i < n; ++i) sharded.own(i).sub_(sharded.own_gradient(i), 0.1);
//   sharded.publish();

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "libddp/ddp/gradient_buckets.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class PrivateView;

/// Arrays in the layout of the buckets.
class ShardedNumbers {
 public:
  /// Collective. `complete`: every rank has the whole arrays, also where they are not shared.
  /// Own blocks are zeros, the rest is uninitialised.
  ShardedNumbers(const Group& group, std::shared_ptr<const GradientBuckets> buckets, bool complete);

  /// Whether what one rank writes the others have.
  bool is_shared() const { return is_shared_; }
  /// What this rank owns for a parameter, in one dimension; memory in the parameter's own order.
  const at::Tensor& own(std::size_t parameter) const { return own_[parameter]; }
  /// Of a bucket. REQUIRES: shared or complete.
  const at::Tensor& array(std::size_t bucket) const { return arrays_[bucket]; }
  /// The parameter's part of the array in its shape. REQUIRES: shared or complete.
  at::Tensor view(std::size_t parameter) const;
  /// A copy of it; a collective where it is neither.
  at::Tensor whole(std::size_t parameter) const;
  /// Takes what this rank owns of `whole`, which has the parameter's shape.
  void load(std::size_t parameter, const at::Tensor& whole);
  /// Every rank gets all blocks; REQUIRES: complete and not shared. A collective.
  void gather() const;

 private:
  const Group group_;
  const std::shared_ptr<const GradientBuckets> buckets_;
  bool is_shared_ = true;
  bool has_all_;
  /// One per bucket; the own block alone where this rank has no more.
  std::vector<at::Tensor> arrays_;
  std::vector<at::Tensor> own_;
};

class ShardedParameters {
 public:
  /// Moves the parameters' values, which must be alike on all ranks, into arrays of its own.
  /// `parameters`: those of `buckets`.
  ShardedParameters(NamedTensors parameters, Group group,
                    std::shared_ptr<const GradientBuckets> buckets);

  std::size_t size() const { return parameters_.size(); }
  const NamedTensors& parameters() const { return parameters_; }
  const at::Tensor& own(std::size_t index) const { return values_.own(index); }
  /// The same part of `.grad`, whatever it is. Throws ArgumentError where it does not look like the
  /// parameter.
  at::Tensor own_gradient(std::size_t index) const;
  /// Bucket and place in it: neighbours in memory have neighbouring positions.
  std::vector<std::size_t> in_order() const;
  /// A further number for each element.
  std::shared_ptr<ShardedNumbers> make_numbers() const;

  /// Waits for all ranks, and takes in what they have changed. Throws StateError where a parameter
  /// was given other memory.
  void begin_update();
  /// Everyone sees what everyone wrote.
  void publish();

 private:
  void move_in();
  void wait_for_device() const;
  void show(std::size_t bucket);
  void check_in_place() const;
  void take_changes();

  const NamedTensors parameters_;
  const Group group_;
  const std::shared_ptr<const GradientBuckets> buckets_;
  ShardedNumbers values_;
  std::vector<at::Tensor> own_gradients_;
  /// Of the shared arrays; and per parameter what it shows.
  std::vector<std::shared_ptr<PrivateView>> private_;
  std::vector<at::Tensor> shown_;
};

}  // namespace libddp
