// Every operator that the fake device has no kernel for: the CPU's kernel over the same memory.
// Results get memory of the device; views and operators in place use what they were given. The race
// checker learns from the schema what is read and written.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/generator.h"
#include "tests/fakegpu/storage.h"

namespace fakegpu {
namespace {

using torch::jit::Stack;

/// One call: its arguments as the CPU's kernel gets them, and what became of them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), stack_(stack), begin_(stack.size() - op.schema().arguments().size()) {}

  void run() {
    const c10::DeviceIndex device = find_device();
    const c10::OptionalDeviceGuard guard(device_at(device));
    DeviceStream& stream = stream_on(device);
    device_ = device_at(device);
    for (std::size_t i = 0; i < op_.schema().arguments().size(); ++i) convert_argument(i, device);
    stream.synchronize();
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const at::DisableRecordFunctionGuard not_of_the_host;
      cpu_operator().redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (const Written& written : written_) take_shape(written.tensor, written.alias);
    for (std::size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i)
      convert_result(stack_[i], device);
    for (const Written& written : written_) add_ranges(written.tensor, writes_);
    // Views touch no memory.
    if (!is_view_ || !writes_.empty()) AccessLog::get().launch(stream, name(), reads_, writes_);
    if (returns_to_host_ || op_.hasTag(at::Tag::dynamic_output_shape))
      AccessLog::get().host_waited(stream);
  }

 private:
  struct Written {
    at::Tensor tensor;
    at::Tensor alias;
  };
  /// An argument and its stand-in; the argument itself where it is a CPU tensor.
  using Given = Written;

  std::string name() const {
    const c10::OperatorName& name = op_.operator_name();
    return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
  }

  /// What runs in the operator's place; convolutions have names of their own on other devices.
  c10::OperatorHandle cpu_operator() {
    c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
    if (name() == "aten::convolution_overrideable")
      return dispatcher.findSchemaOrThrow("aten::convolution", "");
    if (name() == "aten::convolution_backward_overrideable") {
      const std::int64_t num_channels = stack_[begin_].toTensor().size(1);
      const auto bias_sizes = stack_.begin() + static_cast<std::ptrdiff_t>(begin_) + 3;
      stack_.insert(bias_sizes, c10::List<std::int64_t>({num_channels}));
      return dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
    }
    return op_;
  }

  c10::DeviceIndex find_device() const {
    std::optional<c10::Device> named;
    for (std::size_t i = begin_; i < stack_.size(); ++i) {
      const c10::IValue& value = stack_[i];
      if (value.isTensor() && is_on_device(value.toTensor()))
        return value.toTensor().device().index();
      if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector())
          if (is_on_device(tensor)) return tensor.device().index();
      }
      if (value.isDevice()) named = value.toDevice();
    }
    if (named && named->type() == c10::DeviceType::PrivateUse1 && named->has_index())
      return named->index();
    return c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->getDevice().index();
  }

  at::Tensor stand_in(const at::Tensor& tensor, bool is_written) {
    if (tensor.defined()) check_device(tensor);
    if (!is_on_device(tensor)) {
      if (tensor.defined()) given_.push_back({tensor, tensor});
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "fakegpu: ", name(), " of ",
                                tensor.layout(), " tensors");
    const at::Tensor alias = aliases_.of(tensor);
    given_.push_back({tensor, alias});
    if (is_written) {
      written_.push_back({tensor, alias});
    } else {
      add_ranges(tensor, reads_);
    }
    return alias;
  }

  /// As CUDA's kernels: numbers and indices may be the host's, nothing else.
  void check_device(const at::Tensor& tensor) const {
    if (tensor.device() == device_) return;
    const bool may_be_the_hosts = tensor.dim() == 0 || name().find("index") != std::string::npos;
    TORCH_CHECK(tensor.device().is_cpu() && may_be_the_hosts,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_, " and ", tensor.device(), "! (in ", name(), ")");
  }

  void convert_argument(std::size_t index, c10::DeviceIndex device) {
    const c10::Argument& argument = op_.schema().arguments()[index];
    c10::IValue& value = stack_[begin_ + index];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = stand_in(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(stand_in(tensor, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(stand_in(*tensor, is_written)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (argument.name() == "generator") {
      value = generator(value, device);
    }
  }

  /// For what draws random numbers.
  c10::IValue generator(const c10::IValue& given, c10::DeviceIndex device) {
    const at::Generator of_device =
        given.isNone() ? Generator::default_of(device) : given.toGenerator();
    if (of_device.device().is_cpu()) return given;
    return of_device.get<Generator>()->next_on_cpu();
  }

  void convert_result(c10::IValue& value, c10::DeviceIndex device) {
    if (value.isTensor()) {
      value = result(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector())
        list.push_back(result(tensor, device));
      value = list;
    } else if (!value.isNone()) {
      returns_to_host_ = true;
    }
  }

  at::Tensor result(const at::Tensor& tensor, c10::DeviceIndex device) {
    if (!tensor.defined()) return tensor;
    for (const Given& given : given_)
      if (tensor.is_same(given.alias)) return given.tensor;
    if (c10::StorageImpl* const storage =
            aliases_.behind(tensor.storage().unsafeGetStorageImpl())) {
      is_view_ = true;
      // A view is of inference mode where its base is, whichever mode it is made in.
      const c10::InferenceMode as_its_base(is_inference(storage));
      return tensor_over(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
                         tensor, c10::DispatchKey::PrivateUse1);
    }
    at::Tensor made =
        at::empty_strided(tensor.sizes(), tensor.strides(),
                          tensor.options().device(device_at(device)).pinned_memory(false));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    const at::Tensor alias = aliases_.of(made);
    if (made.storage().nbytes() > 0) {
      // With what lies between elements.
      const std::size_t offset = tensor.storage_offset() * tensor.element_size();
      std::memcpy(made.storage().mutable_data(),
                  static_cast<const char*>(tensor.storage().data()) + offset,
                  std::min(made.storage().nbytes(), tensor.storage().nbytes() - offset));
    }
    add_ranges(made, writes_);
    return made;
  }

  bool is_inference(const c10::StorageImpl* storage) const {
    return std::any_of(given_.begin(), given_.end(), [storage](const Given& given) {
      return given.tensor.defined() && given.tensor.has_storage() &&
             given.tensor.storage().unsafeGetStorageImpl() == storage &&
             given.tensor.is_inference();
    });
  }

  const c10::OperatorHandle& op_;
  Stack& stack_;
  const std::size_t begin_;
  c10::Device device_ = device_at(0);
  CpuAliases aliases_;
  std::vector<Given> given_;
  std::vector<Written> written_;
  std::vector<ByteRange> reads_;
  std::vector<ByteRange> writes_;
  bool is_view_ = false;
  bool returns_to_host_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

/// torch has kernels for these that only refuse.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* const name : {"convolution_overrideable", "convolution_backward_overrideable"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace fakegpu
