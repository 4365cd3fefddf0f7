#include "libddp/fsdp/show_data.h"

namespace libddp {
namespace {

bool differs_in_place_only(const at::Tensor& shown, const at::Tensor& data) {
  const c10::TensorImpl& impl = *shown.unsafeGetTensorImpl();
  return shown.dtype() == data.dtype() && shown.device() == data.device() &&
         shown.layout() == at::kStrided && data.layout() == at::kStrided &&
         !impl.is_python_dispatch() && impl.allow_tensor_metadata_change() &&
         !impl.has_symbolic_sizes_strides();
}

/// On another device, which set_data has not for all kinds of devices; and it would make autograd
/// forget the parameter's node, which remembers the device of the whole tensor.
bool differs_in_device(const at::Tensor& shown, const at::Tensor& data) {
  const c10::TensorImpl& impl = *shown.unsafeGetTensorImpl();
  return shown.device() != data.device() && shown.layout() == at::kStrided &&
         data.layout() == at::kStrided && !impl.is_python_dispatch() &&
         impl.allow_tensor_metadata_change();
}

}  // namespace

void show_data(const at::Tensor& shown, const at::Tensor& data) {
  if (differs_in_device(shown, data)) {
    shown.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
    return;
  }
  if (!differs_in_place_only(shown, data)) {
    shown.set_data(data);
    return;
  }
  c10::TensorImpl& impl = *shown.unsafeGetTensorImpl();
  const c10::Storage& storage = data.unsafeGetTensorImpl()->unsafe_storage();
  if (impl.unsafe_storage().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) {
    impl.set_storage_keep_dtype(storage);
  }
  impl.set_sizes_and_strides(data.sizes(), data.strides(), data.storage_offset());
}

}  // namespace libddp
