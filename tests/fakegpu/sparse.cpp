// Sparse COO tensors on the fake device, as far as gradients of embeddings need them: how they are
// made and taken apart. Coalescing runs on the host, between two copies.

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

namespace fakegpu {
namespace {

at::Tensor on(c10::Device device, const at::Tensor& sparse) {
  return at::_sparse_coo_tensor_unsafe(sparse._indices().to(device), sparse._values().to(device),
                                       sparse.sizes(), sparse.options().device(device),
                                       sparse.is_coalesced());
}

at::Tensor coalesce(const at::Tensor& sparse) {
  return on(sparse.device(), on(c10::kCPU, sparse).coalesce());
}

at::Tensor to_dense(const at::Tensor& sparse, std::optional<at::ScalarType> dtype,
                    std::optional<bool> /*masked_grad*/) {
  return on(c10::kCPU, sparse).to_dense(dtype).to(sparse.device());
}

at::Tensor clone(const at::Tensor& sparse, std::optional<at::MemoryFormat> /*format*/) {
  return at::_sparse_coo_tensor_unsafe(sparse._indices().clone(), sparse._values().clone(),
                                       sparse.sizes(), sparse.options(), sparse.is_coalesced());
}

at::Tensor to_copy(const at::Tensor& sparse, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                   std::optional<bool> /*pin_memory*/, bool /*non_blocking*/,
                   std::optional<at::MemoryFormat> /*format*/) {
  const at::Tensor values = sparse._values().to(dtype.value_or(sparse.scalar_type()));
  const at::Tensor same =
      at::_sparse_coo_tensor_unsafe(sparse._indices(), values, sparse.sizes(),
                                    values.options().layout(at::kSparse), sparse.is_coalesced());
  return on(device.value_or(sparse.device()), same);
}

/// In place; what is added to a dense tensor may be sparse, and what is added to a sparse one is.
at::Tensor& add_(at::Tensor& to, const at::Tensor& sparse, const at::Scalar& alpha) {
  at::Tensor sum = to.is_sparse() ? on(c10::kCPU, to) : to.cpu();
  sum.add_(on(c10::kCPU, sparse), alpha);
  if (!to.is_sparse()) return to.copy_(sum);
  return at::native::copy_sparse_(to, on(to.device(), sum));
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors",
               TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  library.impl("_values", TORCH_FN(at::native::_values_sparse));
  library.impl("indices", TORCH_FN(at::native::indices_sparse));
  library.impl("values", TORCH_FN(at::native::values_sparse));
  library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  library.impl("_coalesce", TORCH_FN(coalesce));
  library.impl("_to_dense", TORCH_FN(to_dense));
  library.impl("clone", TORCH_FN(clone));
  library.impl("_to_copy", TORCH_FN(to_copy));
  library.impl("add_.Tensor", TORCH_FN(add_));
}

}  // namespace
}  // namespace fakegpu
