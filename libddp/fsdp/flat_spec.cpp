#include "libddp/fsdp/flat_spec.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

namespace libddp {
namespace {

std::vector<FlatLayout::Shape> shapes_of(const NamedTensors& parameters) {
  std::vector<FlatLayout::Shape> shapes;
  for (const auto& [name, tensor] : parameters) shapes.push_back(tensor.sizes().vec());
  return shapes;
}

/// Integers and such have no lower precision.
at::ScalarType compute_dtype_of(at::ScalarType dtype, const ShardOptions& options) {
  return c10::isFloatingType(dtype) ? options.param_dtype.value_or(dtype) : dtype;
}

}  // namespace

FlatSpec::FlatSpec(std::string name, NamedTensors of, const ShardOptions& how)
    : label(std::move(name)),
      parameters(std::move(of)),
      options(how),
      device(device_of(parameters, how)),
      layout(shapes_of(parameters), options.shard ? options.shard->size() : 1,
             /*pads_chunks=*/!device.is_cpu()),
      dtype(parameters.front().tensor.scalar_type()),
      compute_dtype(compute_dtype_of(dtype, options)),
      reduce_dtype(options.reduce_dtype.value_or(options.wide_gradients ? dtype : compute_dtype)),
      gradient_dtype(!options.keep_low_gradients ? dtype
                     : is_sharded()              ? compute_dtype
                                                 : reduce_dtype),
      call_label(label) {}

c10::Device FlatSpec::device_of(const NamedTensors& parameters, const ShardOptions& options) {
  if (!options.compute_device || options.compute_device->is_cpu()) {
    return parameters.front().tensor.device();
  }
  const c10::Device device = *options.compute_device;
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

at::TensorOptions FlatSpec::home_options(at::ScalarType of) const {
  if (!is_offloaded()) return tensor_options(of);
  return at::TensorOptions().dtype(of).device(c10::kCPU).pinned_memory(options.pin_memory);
}

at::Tensor FlatSpec::shard_of(const at::Tensor& block, std::size_t index) const {
  return block.narrow(0, layout.shard_offset(index), layout.shard(index, rank()).numel())
      .view(layout.shard_shape(index, rank()));
}

at::Tensor FlatSpec::shard_in(const at::Tensor& blocks, std::size_t index, int rank) const {
  return blocks.narrow(0, layout.shard_offset(index, rank), layout.shard(index, rank).numel());
}

at::Tensor FlatSpec::shard_in_whole(const at::Tensor& whole, std::size_t index) const {
  const FlatLayout::ShardSpec shard = layout.shard(index, rank());
  return whole.reshape(-1).narrow(0, shard.begin, shard.numel());
}

}  // namespace libddp
