#include "libddp/fsdp/host_gradient_store.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace libddp {

void HostGradientStore::begin_array() {
  if (array_.has_begun()) return;
  const bool is_block = !spec_.is_sharded() && spec_.reduce_dtype == spec_.gradient_dtype &&
                        !accumulated_.keeps_any() && !accumulated_.is_in(block_.tensor());
  if (!is_block) return array_.begin();
  block_.leave_to_keepers();
  block_.begin(/*is_overwritten=*/false);
  array_.begin_in(block_.tensor());
}

void HostGradientStore::add(const at::Tensor& grad, std::size_t index) {
  begin_array();
  array_.add(grad, index);
}

void HostGradientStore::begin_reduction(const GradientReduction& reduction) {
  begin_array();
  array_.complete(reduction.notes_used);
  if (!spec_.is_sharded()) {
    if (reduction.divisor && !spec_.options.replicate) array_.tensor().div_(*reduction.divisor);
    average_ = array_.tensor();
    return;
  }
  const bool keeps_any = accumulated_.keeps_any();
  const bool may_overwrite = spec_.reduce_dtype == spec_.gradient_dtype && !keeps_any;
  if (!keeps_any) block_.begin(may_overwrite);
  average_ =
      may_overwrite ? block_.tensor() : at::empty({spec_.layout.block_numel()}, spec_.reduce_dtype);
}

WorkPtr HostGradientStore::reduce(const ReduceOptions& first, const ReduceOptions&,
                                  const std::string& label) {
  const CallOptions async{.async = true, .label = label};
  const ShardOptions& options = spec_.options;
  if (spec_.is_sharded()) {
    return options.shard->reduce_scatter_into(average_, array_.tensor(), first, async);
  }
  return options.replicate ? options.replicate->all_reduce(average_, first, async) : nullptr;
}

void HostGradientStore::collect(Work& work, const ReduceOptions& second, const std::string& label) {
  work.wait();
  if (spec_.is_sharded() && spec_.options.replicate) {
    spec_.options.replicate->all_reduce(average_, second, {.label = label});
  }
}

void HostGradientStore::end_reduction() {
  if (spec_.is_sharded()) array_.end();
}

bool HostGradientStore::was_any_used() {
  bool any = false;
  for (std::size_t i = 0; i < spec_.size(); ++i) any |= was_used(i);  // takes every note
  return any;
}

void HostGradientStore::install(const std::vector<bool>& averaged) {
  install_block(std::exchange(average_, at::Tensor()), averaged);
  if (!spec_.is_sharded()) array_.end();
}

void HostGradientStore::abandon() {
  array_.end();
  average_ = at::Tensor();
  block_.release();  // half written
}

}  // namespace libddp
