#pragma once

// What a flat array of parameters is: which parameters, of which dtypes, laid out how, on whose
// account. The classes of one FlatParameter share it; only its name and place are given later.
// Thread rule: plain data.
//
//   FlatSpec spec("unit h.0", parameters, {.shard = group});
//   spec.shard_of(block, 0);   // this rank's rows of parameter 0

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "libddp/fsdp/flat_layout.h"
#include "libddp/fsdp/shard_options.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

struct FlatSpec {
  /// REQUIRES: parameters of one dtype on one device, at least one.
  FlatSpec(std::string name, NamedTensors of, const ShardOptions& how);
  /// That parameters sharded like this are computed with on.
  static c10::Device device_of(const NamedTensors& parameters, const ShardOptions& options);

  const std::string label;
  const NamedTensors parameters;
  const ShardOptions options;
  /// Of the computation; of shards and gradients too where nothing is offloaded.
  const c10::Device device;
  const FlatLayout layout;
  /// Of the parameters, of what the computation reads, of the reduction, and of `.grad`.
  const at::ScalarType dtype;
  const at::ScalarType compute_dtype;
  const at::ScalarType reduce_dtype;
  const at::ScalarType gradient_dtype;
  /// Which array of the model it is, alike on all ranks, and what its collectives are called: see
  /// FlatParameter::set_place.
  std::uint64_t place = 0;
  std::string call_label;

  std::size_t size() const { return parameters.size(); }
  int rank() const { return options.shard ? options.shard->rank() : 0; }
  bool is_on_device() const { return !device.is_cpu(); }
  at::TensorOptions tensor_options(at::ScalarType of) const {
    return at::TensorOptions().dtype(of).device(device);
  }
  /// Whether shards and their gradients are in the host's memory and not on the device.
  bool is_offloaded() const {
    return options.compute_device.has_value() && !options.compute_device->is_cpu();
  }
  /// Of shards and their gradients.
  at::TensorOptions home_options(at::ScalarType of) const;
  bool is_sharded() const { return options.shard && options.shard->size() > 1; }
  /// Whether what this rank owns of a parameter is something else than the parameter whole.
  bool has_shards_apart() const { return is_sharded() || is_offloaded(); }
  /// Whether gradients may come in another dtype than the computation's: ShardOptions says when.
  bool takes_wide_gradients() const {
    return options.wide_gradients && c10::isFloatingType(compute_dtype) &&
           c10::elementSize(reduce_dtype) > c10::elementSize(compute_dtype);
  }
  /// Whether the dtype has gradients at all.
  bool can_require_grad() const { return c10::isFloatingType(dtype) || c10::isComplexType(dtype); }
  /// This rank's part of a parameter, in its block, in the parameter's form.
  at::Tensor shard_of(const at::Tensor& block, std::size_t index) const;
  /// That of any rank, in all blocks, flat.
  at::Tensor shard_in(const at::Tensor& blocks, std::size_t index, int rank) const;
  /// This rank's part of a whole tensor, flat.
  at::Tensor shard_in_whole(const at::Tensor& whole, std::size_t index) const;
};

}  // namespace libddp
