#include "libddp/fsdp/device_gradient_store.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "libddp/fsdp/plain_tensor.h"

namespace libddp {
namespace {

/// In the form of a parameter; no view in autograd's sense, see GradientBlock::shard.
at::Tensor shaped(const at::Tensor& tensor, const FlatLayout::Shape& shape) {
  at::Tensor made = tensor.variable_data();
  made.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return made;
}

}  // namespace

DeviceGradientStore::DeviceGradientStore(const FlatSpec& spec, AccumulatedGradients& accumulated)
    : GradientStore(spec, accumulated),
      grads_(spec.size()),
      came_(spec.size()),
      streams_(spec.device),
      buffers_(spec.is_offloaded() ? DeviceBuffers::of(spec.options.shard, spec.device) : nullptr) {
}

void DeviceGradientStore::add(const at::Tensor& grad, std::size_t index) {
  const c10::NoGradGuard no_grad;
  came_[index] = true;
  at::Tensor& mine = grads_[index];
  if (mine.defined()) {
    streams_.order_current();
    mine = mine + grad;  // others may have the first
  } else {
    // What is averaged in place, or shown, must be nobody else's.
    const bool is_kept = !spec_.is_sharded() && accumulated_.waiting(index).is_same(grad);
    mine = is_kept || !is_plain(grad) ? grad.clone(at::MemoryFormat::Contiguous) : grad.detach();
  }
  streams_.add_current();
}

std::int64_t DeviceGradientStore::sent_numel(std::size_t index) const {
  const FlatLayout& layout = spec_.layout;
  return spec_.is_sharded() ? layout.chunk_numel(index) * layout.world_size()
                            : layout.numel_of(index);
}

bool DeviceGradientStore::is_ready(std::size_t index) const {
  const at::Tensor& grad = grads_[index];
  return grad.scalar_type() == spec_.reduce_dtype && grad.numel() == sent_numel(index);
}

void DeviceGradientStore::begin_reduction(const GradientReduction& reduction) {
  const c10::NoGradGuard no_grad;
  streams_.order_current();
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!reduction.averaged[i] || grads_[i].defined()) continue;
    grads_[i] = at::zeros({sent_numel(i)}, spec_.tensor_options(spec_.reduce_dtype));
  }
  make_ready(reduction.averaged);
  notes_ = at::Tensor();
  if (reduction.notes_used && (spec_.is_sharded() || spec_.options.replicate)) begin_notes();
  if (!spec_.is_sharded() && reduction.divisor && !spec_.options.replicate) {
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < spec_.size(); ++i) {
      if (reduction.averaged[i]) all.push_back(grads_[i]);
    }
    at::_foreach_div_(all, *reduction.divisor);
  }
  if (buffers_) begin_block();
  if (!spec_.is_sharded()) return buffers_ ? pack(reduction.averaged) : void();
  if (buffers_) return;
  const bool may_overwrite =
      spec_.reduce_dtype == spec_.gradient_dtype && !accumulated_.keeps_any();
  if (may_overwrite) block_.begin(/*is_overwritten=*/true);
  average_ = may_overwrite ? block_.tensor()
                           : at::empty({spec_.layout.block_numel()},
                                       spec_.tensor_options(spec_.reduce_dtype));
}

/// Those that cannot travel as they are, by one copy. What lies behind the last row counts nowhere,
/// but may be no number.
void DeviceGradientStore::make_ready(const std::vector<bool>& averaged) {
  std::int64_t numel = 0;
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!averaged[i] || is_ready(i)) continue;
    left.push_back(i);
    numel += sent_numel(i);
  }
  if (left.empty()) return;
  at::Tensor rest = at::empty({numel}, spec_.tensor_options(spec_.reduce_dtype));
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const std::size_t i : left) {
    const at::Tensor place = rest.narrow(0, 0, sent_numel(i));
    rest = rest.narrow(0, sent_numel(i), rest.numel() - sent_numel(i));
    at::Tensor grad = std::exchange(grads_[i], place);
    const std::int64_t used = grad.numel();
    if (used < place.numel()) place.narrow(0, used, place.numel() - used).zero_();
    to.push_back(place.narrow(0, 0, used));
    from.push_back(grad.view(-1));
  }
  at::_foreach_copy_(to, from);
}

void DeviceGradientStore::begin_notes() {
  const auto size = static_cast<std::int64_t>(spec_.size());
  const at::TensorOptions options = spec_.tensor_options(spec_.reduce_dtype);
  if (!spec_.is_sharded()) {
    notes_ = at::ones({size}, options);
  } else {
    if (!all_used_.defined()) all_used_ = at::ones({spec_.layout.world_size(), size}, options);
    notes_ = all_used_;
  }
  for (std::int64_t i = 0; i < size; ++i) {
    if (came_[static_cast<std::size_t>(i)]) continue;
    if (notes_.is_same(all_used_)) notes_ = notes_.clone();
    notes_.select(-1, i).zero_();
  }
}

/// In a buffer, so that its memory is used again behind the copy and not behind the computation.
void DeviceGradientStore::begin_block() {
  const std::int64_t numel = spec_.layout.block_numel();
  on_device_ = buffers_->take(numel, spec_.reduce_dtype);
  on_device_->users.add_current();
  average_ = on_device_->as(numel, spec_.reduce_dtype).zero_();
}

/// Those of an array that is not sharded, as its block; the tensors are not needed any more.
void DeviceGradientStore::pack(const std::vector<bool>& averaged) {
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!averaged[i]) continue;
    from.push_back(grads_[i].view(-1));
    to.push_back(spec_.shard_in(average_, i, 0));
  }
  if (notes_.defined()) {
    from.push_back(notes_);
    to.push_back(average_.narrow(0, spec_.layout.notes_offset(), notes_.numel()));
  }
  at::_foreach_copy_(to, from);
  StreamUsers current(spec_.device);
  current.add_current();
  for (const c10::Stream& stream : streams_.streams()) current.order(stream);
  for (at::Tensor& grad : grads_) grad = at::Tensor();
}

/// What is there already is added to by the host, which has the averages in a block of their own
/// then.
void DeviceGradientStore::send_to_host(Work* reduction) {
  const c10::NoGradGuard no_grad;
  const std::int64_t numel = spec_.layout.block_numel();
  if (accumulated_.keeps_any()) {
    on_host_ = at::empty({numel}, spec_.home_options(spec_.gradient_dtype));
  } else {
    block_.begin(/*is_overwritten=*/true);
    on_host_ = block_.tensor();
  }
  HostCopies& copies = buffers_->host_copies();
  const StreamUsers& written_in = on_device_->users;
  const c10::StreamGuard guard(copies.to_host());
  reduction != nullptr ? reduction->wait() : written_in.order_current();
  at::Tensor block = std::exchange(average_, at::Tensor());
  on_device_->users.add_current();
  if (spec_.reduce_dtype != spec_.gradient_dtype) {
    DeviceBuffer converted = buffers_->take(numel, spec_.gradient_dtype);
    block = converted.as(numel, spec_.gradient_dtype).copy_(block);
    converted.users.add_current();
    copies.copy_out(on_host_, block);
    buffers_->give(std::move(converted));
  } else {
    copies.copy_out(on_host_, block);
  }
  buffers_->give(std::move(*on_device_));
  on_device_.reset();
}

const at::Tensor& DeviceGradientStore::whole() {
  if (buffers_ && !spec_.is_sharded()) return average_;
  if (blocks_.defined()) return blocks_;
  const c10::NoGradGuard no_grad;
  blocks_ = at::zeros({spec_.layout.blocks_numel()}, spec_.tensor_options(spec_.reduce_dtype));
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    for (int rank = 0; rank < spec_.layout.world_size(); ++rank) {
      const FlatLayout::ShardSpec shard = spec_.layout.shard(i, rank);
      to.push_back(spec_.shard_in(blocks_, i, rank));
      from.push_back(grads_[i].view(-1).narrow(0, shard.begin, shard.numel()));
    }
  }
  at::_foreach_copy_(to, from);
  if (notes_.defined() && spec_.is_sharded()) {
    const at::Tensor rows = blocks_.view({spec_.layout.world_size(), -1});
    rows.narrow(1, spec_.layout.notes_offset(), notes_.size(1)).copy_(notes_);
  }
  if (!spec_.is_sharded()) average_ = blocks_;
  return blocks_;
}

const at::Tensor& DeviceGradientStore::average() {
  if (!average_.defined()) whole();
  return average_;
}

WorkPtr DeviceGradientStore::reduce(const ReduceOptions& first, const ReduceOptions& second,
                                    const std::string& label) {
  WorkPtr work = reduce_on_device(first, second, {.async = true, .label = label});
  if (buffers_) send_to_host(work.get());
  return work;
}

WorkPtr DeviceGradientStore::reduce_on_device(const ReduceOptions& first,
                                              const ReduceOptions& second,
                                              const CallOptions& options) {
  if (!spec_.is_sharded()) {
    if (buffers_ && spec_.options.replicate) {
      return spec_.options.replicate->all_reduce(average_, first, options);
    }
    return spec_.options.replicate ? all_reduce(first, options) : nullptr;
  }
  const WorkPtr work = reduce_scatter(first, options);
  if (!work || !spec_.options.replicate) return work;
  return average_replicas(*work, second, options);
}

WorkPtr DeviceGradientStore::reduce_scatter(const ReduceOptions& first,
                                            const CallOptions& options) {
  const FlatLayout& layout = spec_.layout;
  std::vector<at::Tensor> parts;
  std::vector<at::Tensor> wholes;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!grads_[i].defined() || sent_numel(i) == 0) continue;
    parts.push_back(average_.narrow(0, layout.shard_offset(i), layout.chunk_numel(i)));
    wholes.push_back(grads_[i]);
  }
  if (notes_.defined()) {
    parts.push_back(average_.narrow(0, layout.notes_offset(), notes_.size(1)));
    wholes.push_back(notes_);
  }
  if (parts.empty()) return nullptr;
  return spec_.options.shard->reduce_scatter_into_coalesced(parts, wholes, first, options);
}

WorkPtr DeviceGradientStore::all_reduce(const ReduceOptions& first, const CallOptions& options) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& grad : grads_) {
    if (grad.defined() && grad.numel() > 0) all.push_back(grad);
  }
  if (notes_.defined()) all.push_back(notes_);
  if (all.empty()) return nullptr;
  return spec_.options.replicate->all_reduce_coalesced(all, first, options);
}

WorkPtr DeviceGradientStore::average_replicas(Work& first, const ReduceOptions& second,
                                              const CallOptions& options) {
  if (!between_) {
    between_ =
        c10::impl::VirtualGuardImpl(spec_.device.type()).getStreamFromGlobalPool(spec_.device);
  }
  const c10::StreamGuard guard(*between_);
  first.wait();
  return spec_.options.replicate->all_reduce(average_, second, options);
}

void DeviceGradientStore::collect(Work& work, const ReduceOptions&, const std::string&) {
  work.wait();
  const c10::Stream current = current_stream_on(spec_.device);
  for (const c10::Stream& stream : streams_.streams()) {
    if (stream == current) continue;
    const c10::StreamGuard guard(stream);
    work.wait();
  }
}

void DeviceGradientStore::end_reduction() {
  if (on_device_) send_to_host(nullptr);  // who averages has done it
  if (!spec_.has_shards_apart()) return;
  for (at::Tensor& grad : grads_) grad = at::Tensor();
  blocks_ = at::Tensor();
  streams_.clear();
}

bool DeviceGradientStore::was_used(std::size_t index) {
  if (came_[index]) return true;
  if (!notes_.defined()) return false;
  const auto place = static_cast<std::int64_t>(index);
  if (buffers_) {
    buffers_->host_copies().finish();
    return on_host_[spec_.layout.notes_offset() + place].item<double>() != 0;
  }
  const at::Tensor note =
      spec_.is_sharded() ? average_[spec_.layout.notes_offset() + place] : notes_[place];
  return note.item<double>() != 0;
}

/// Waits for the device only where nothing came here.
bool DeviceGradientStore::was_any_used() {
  if (std::find(came_.begin(), came_.end(), true) != came_.end()) return true;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (was_used(i)) return true;
  }
  return false;
}

void DeviceGradientStore::install(const std::vector<bool>& averaged) {
  if (buffers_) buffers_->host_copies().finish();
  const at::Tensor result = std::exchange(buffers_ ? on_host_ : average_, at::Tensor());
  result.defined() ? install_block(result, averaged) : install_whole(averaged);
  forget();
}

/// Autograd's own tensors, or copies in the dtype of `.grad` one behind the other.
void DeviceGradientStore::install_whole(const std::vector<bool>& averaged) {
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!averaged[i] || spec_.reduce_dtype == spec_.gradient_dtype) continue;
    block_.begin(/*is_overwritten=*/true);
    from.push_back(grads_[i].view(-1));
    grads_[i] = block_.shard(i);
    to.push_back(grads_[i].view(-1));
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
  for (std::size_t i = 0; i < spec_.size(); ++i) {
    if (!averaged[i]) continue;
    at::Tensor mine = shaped(grads_[i], spec_.layout.shard_shape(i, spec_.rank()));
    at::Tensor& kept = accumulated_.kept(i);
    kept.defined() ? accumulated_.add_to_kept(mine, i) : void(kept = std::move(mine));
  }
  if (!to.empty()) block_.note_shown();
}

void DeviceGradientStore::forget() {
  for (at::Tensor& grad : grads_) grad = at::Tensor();
  came_.assign(came_.size(), false);
  blocks_ = notes_ = average_ = on_host_ = at::Tensor();
  on_device_.reset();
  streams_.clear();
}

void DeviceGradientStore::abandon() {
  forget();
  block_.release();  // half written
}

}  // namespace libddp
