#pragma once

// A torch::nn::Module whose parameters are a unit, and where to find it: LibTorch's modules have no
// hooks, so whoever runs the module asks here for what belongs around its forward.
//
// A module is found by its address until it ends or the model around it does. What happens around a
// forward is ShardedModel's; this is the face that LibTorch's modules have.
// Thread rule: finding and adding from any thread; one forward or backward at a time per model.
//
//   if (const auto wrapped = WrappedModule::find(block)) wrapped->run([&] { return f(x); });

#include <torch/nn/module.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libddp/autograd/output_tensors.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/fsdp/sharded_model_options.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class ParamGroup;
class ShardedModel;

/// Elements [begin, end) of a parameter of this shape, in C order.
struct OwnedPart {
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Other ranks have others.
  bool is_sharded = false;
};

class WrappedModule {
 public:
  /// Shards what `module` holds and no wrapped module under it does. Collective.
  /// Throws ArgumentError: it is wrapped already; what ParamGroup refuses.
  static std::shared_ptr<WrappedModule> wrap(const std::shared_ptr<torch::nn::Module>& module,
                                             const std::string& name, const ShardOptions& options);
  /// Null where the module is not wrapped.
  static std::shared_ptr<WrappedModule> find(const torch::nn::Module& module);
  /// `root` and all wrapped modules under it become one model; `root` must be wrapped.
  static std::shared_ptr<ShardedModel> join(const torch::nn::Module& root,
                                            ShardedModelOptions options);
  /// `root` and what is under it go on in other groups, with the same parameters, whose values are
  /// undefined then: see ParamGroup::leave. A collective of these groups, the one that wrapping
  /// them in their order is. `regroup`: what the options of a unit become. No model may have the
  /// units any more; `join` follows. Where it throws, it can be repeated.
  static void rejoin(const torch::nn::Module& root,
                     const std::function<ShardOptions(const ShardOptions&)>& regroup);
  /// TensorImpl of each parameter -> the ranks that own a part each of it (null: this rank has
  /// all). `around`: of the whole model; in the place of groups of some of its ranks where others
  /// of these have another parameter (experts). Replicas have the same.
  static std::unordered_map<const void*, Group> owners(const Group& around = nullptr);
  /// The ranks that a wrapped module's own unit is sharded over, or replicated; null: one rank.
  static Group group_of(const torch::nn::Module& module);
  /// TensorImpl of each parameter of the wrapped modules of `root` -> what this rank has of it.
  /// Throws StateError for one that has left its group: its rejoin has failed, or is to come.
  static std::unordered_map<const void*, OwnedPart> owned_parts(const torch::nn::Module& root);
  /// `root` and what is under it are not found any more.
  static void forget(const torch::nn::Module& root);

  WrappedModule(const std::shared_ptr<torch::nn::Module>& module, std::string name,
                NamedTensors parameters, const ShardOptions& options);

  /// `forward()` with whole parameters.
  template <typename Forward>
  auto run(const Forward& forward) {
    const std::shared_ptr<ShardedModel> model = begin();
    auto output = guarded(*model, forward);
    end(*model, output_tensors(output));
    return output;
  }
  /// What floating-point inputs are converted to.
  const std::optional<at::ScalarType>& input_dtype() const;

 private:
  template <typename Forward>
  auto guarded(ShardedModel& model, const Forward& forward) {
    try {
      return forward();
    } catch (...) {
      fail(model, std::current_exception());
      throw;
    }
  }
  std::shared_ptr<ShardedModel> begin();
  void end(ShardedModel& model, const std::vector<at::Tensor>& outputs);
  void fail(ShardedModel& model, const std::exception_ptr& error);

  static std::vector<std::shared_ptr<WrappedModule>> all_in(const torch::nn::Module& root);
  void make_unit(const ShardOptions& options);

  const std::weak_ptr<torch::nn::Module> module_;
  const std::string name_;
  const NamedTensors parameters_;
  /// When it was wrapped, among all of the process.
  const std::uint64_t number_;
  ShardOptions options_;
  /// Null between two groups.
  std::shared_ptr<ParamGroup> unit_;
  std::weak_ptr<ShardedModel> model_;
  /// Where there is no model, that has failed.
  bool has_rejoined_ = false;
};

}  // namespace libddp
