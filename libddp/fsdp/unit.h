#pragma once

// The parameters of one wrapped module, and what happens to them around its forward and backward.
//
// A unit is sharded, unsharded for its module's forward, sharded again, unsharded for its backward,
// and sharded once its last gradient has come, which also starts the averaging. ShardedModel calls
// it and knows the order of all units.
// Thread rule: one forward or backward at a time. Construction, unshard and reduce are collectives.
//
//   auto unit = Unit::create("h.0", parameters, options);
//   auto model = ShardedModel::create({root, unit}, group);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libddp/fsdp/buffer_pool.h"
#include "libddp/fsdp/flat_parameter.h"
#include "libddp/fsdp/owned_tensors.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/group/named_tensor.h"

namespace libddp {

class Unit {
 public:
  /// `parameters`: of this unit alone, named as in its module; may be empty. Collective.
  /// Throws ArgumentError where a parameter is not a leaf on the CPU, or wrapped already.
  Unit(std::string name, const NamedTensors& parameters, ShardOptions options);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const ShardOptions& options() const { return options_; }
  const std::vector<std::unique_ptr<FlatParameter>>& flats() const { return flats_; }

  /// Called with the unit when autograd has written one of its gradients.
  void on_gradient(std::function<void(Unit&)> callback) { on_gradient_ = std::move(callback); }

  void publish();
  bool needs_meeting() const;
  void begin_unshard();
  void show_full();
  /// `reshard`: gathered bytes are given back too.
  void show_pieces(bool reshard);

  void release_gradients();
  void hide_gradients();
  bool hides_gradients() const { return is_in_pass_; }
  /// All gradients of this pass have come.
  bool is_complete() const { return is_complete_; }
  bool has_gradients() const;
  void reduce();
  /// Instead of reduce, for who averages several units at once.
  void begin_reduction();
  bool is_reducing() const { return is_reducing_; }
  void collect();
  void install();
  void abandon();

 private:
  void take_gradient(std::size_t flat, std::size_t index);

  const std::string name_;
  const ShardOptions options_;
  OwnedTensors owned_;
  std::function<void(Unit&)> on_gradient_;
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::size_t num_complete_ = 0;
  std::size_t num_trained_ = 0;
  bool is_in_pass_ = false;
  bool is_complete_ = false;
  bool is_reducing_ = false;
};

}  // namespace libddp
