#pragma once

// Parameters whose gradients are averaged only in those backward passes that reach another
// parameter, the trigger: until then they add up on each rank. For parts of a model that several
// passes share, while the rest is reduced by a Reducer pass by pass.
//
// The average is taken at the end of the pass, when all gradients are there, whatever the order in
// which they came. A parameter that no rank used keeps its `.grad` as it was.
// Collective order: one all-reduce per dtype at the end of a pass with the trigger, the same on
// every rank.
// Thread rule: as Reducer.
//
//   auto delayed = DelayedGradients::create({shared_parameters, first_layer.weight}, group);
//   delayed->arm(true);     // after each forward

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "libddp/autograd/accumulate_hooks.h"
#include "libddp/ddp/device_gradients.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slot.h"
#include "libddp/ddp/options.h"
#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class DelayedGradients : public std::enable_shared_from_this<DelayedGradients> {
 public:
  using Rethrow = std::function<void(std::exception_ptr)>;

  /// Throws ArgumentError where a parameter or the trigger does not require a gradient.
  /// `rethrow`: see ReducerOptions.
  static std::shared_ptr<DelayedGradients> create(DelayedParameters delayed, Group group,
                                                  Rethrow rethrow = nullptr);

  /// Whether the passes to come synchronise.
  void arm(bool synchronises);

  /// See Reducer.
  void renew_hooks();
  void accept_gradients_of(at::ScalarType dtype);

 private:
  DelayedGradients(DelayedParameters delayed, Group group, Rethrow rethrow);

  void on_gradient(std::size_t index);
  void on_trigger();
  void average();
  void fill(std::size_t bucket);
  void install(std::size_t bucket);
  template <typename Function>
  void guarded(Function&& function);

  const Group group_;
  const Rethrow rethrow_;
  std::vector<GradientSlot> slots_;
  /// Where the parameters are on one.
  std::optional<DeviceGradients> on_device_;
  std::unique_ptr<GradientBuckets> buckets_;
  bool synchronises_ = true;
  /// The pass that will average, while it lasts: autograd has it, and drops it where it fails.
  std::weak_ptr<void> pass_;
  // Last: destroyed first, so no hook runs into a half-destroyed object.
  AccumulateHooks hooks_;
  AccumulateHooks trigger_hook_;
};

}  // namespace libddp
