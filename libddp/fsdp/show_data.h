#pragma once

// Tensor::set_data for plain tensors of one dtype, without what it does for all other kinds: a unit
// shows other data of all its parameters four times per step. And for plain tensors on two devices,
// as parameters are offloaded.
// Thread rule: one thread at a time per tensor.
//
//   show_data(weight, whole);  // `weight` stays the same object, with the bytes of `whole`

#include <ATen/core/Tensor.h>

namespace libddp {

/// Gives `shown` the storage, sizes and strides of `data`; autograd's record, its hooks and its
/// version counter stay. Throws c10::Error where `data` is of another kind (layout).
void show_data(const at::Tensor& shown, const at::Tensor& data);

}  // namespace libddp
