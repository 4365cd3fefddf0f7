#pragma once

// Whether a tensor's bytes are its values, so that they may be copied or shared as they are.
// Thread rule: pure.
//
//   if (is_plain(grad)) std::memcpy(place, grad.const_data_ptr(), bytes);

#include <ATen/core/Tensor.h>

namespace libddp {

/// Whether its bytes are its values, one behind the other.
inline bool is_plain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_python_dispatch() && !tensor._is_zerotensor() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.is_contiguous();
}

}  // namespace libddp
