#include "libddp/group/operand.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/group/validation.h"
#include "libddp/kernels/copy_bytes.h"

namespace libddp {
namespace {

std::string type_text(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kComplexFloat:
      return "complex64";
    case at::kComplexDouble:
      return "complex128";
    default:
      break;
  }
  if (const auto dtype = wire_dtype(tensor.scalar_type())) return std::string(name(*dtype));
  std::string text = c10::toString(tensor.scalar_type());
  for (char& letter : text) letter = static_cast<char>(std::tolower(letter));
  return text;
}

void check_storage(OperationSite& site, const char* argument, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    site.refuse(fmt::format("argument {} is an undefined tensor", argument),
                "pass a tensor with storage");
  }
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    site.refuse(fmt::format("argument {} is {}, which a group does not move", argument,
                            tensor.is_nested() ? "a nested tensor" : "sparse"),
                "pass its dense parts (values, indices), or tensor.to_dense()");
  }
  if (!site.device) {
    site.device = tensor.device();
    site.argument = argument;
    site.tensor = &tensor;
  }
  if (*site.device == tensor.device()) return;
  site.refuse(fmt::format("argument {} is on device {}, but another tensor of the call is on {}",
                          describe(argument, tensor), tensor.device().str(), site.device->str()),
              "move all tensors of one call to one device");
}

void check_writable(const CallSite& site, const char* argument, const at::Tensor& tensor) {
  if (tensor.is_conj() || tensor.is_neg()) {
    site.refuse(fmt::format("argument {} is a lazy conjugate or negative view and cannot be "
                            "written",
                            describe(argument, tensor)),
                "pass tensor.resolve_conj().resolve_neg()");
  }
  // On the host the copy back finds out whether the result is one.
  if (tensor.is_contiguous() || tensor.is_cpu()) return;
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    site.refuse(fmt::format("argument {} has elements that share memory (strides [{}]), so the "
                            "result would be ambiguous",
                            describe(argument, tensor), fmt::join(tensor.strides(), ", ")),
                "pass tensor.contiguous() or tensor.clone()");
  }
}

/// Of what `user` has several times, by expand(), the first.
at::Tensor without_repeats(at::Tensor tensor, const at::Tensor& user) {
  for (std::int64_t dim = 0; dim < user.dim(); ++dim) {
    if (user.stride(dim) == 0 && user.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  }
  return tensor;
}

/// NaNs are not equal.
bool are_same_bytes(const at::Tensor& one, const at::Tensor& other) {
  const auto bytes_of = [](const at::Tensor& t) {
    return t.contiguous().view({-1}).view(at::kByte);
  };
  return at::equal(bytes_of(one), bytes_of(other));
}

/// Our own copies are no business of autograd: no graph, no version counters.
using Quiet = at::AutoDispatchBelowADInplaceOrView;

void copy_back(const Operand& operand) {
  Quiet quiet;
  const at::Tensor& user = operand.user;
  const at::Tensor result = user.is_complex() ? at::view_as_complex(operand.wire) : operand.wire;
  if (operand.repeating.empty()) {
    user.copy_(result);
    return;
  }
  without_repeats(user, user).copy_(without_repeats(result, user));
  if (are_same_bytes(user, result)) return;
  throw ArgumentError(fmt::format(
      "{} has elements that share memory (strides [{}]), and the result has several values for "
      "them. Hint: pass tensor.contiguous().",
      operand.repeating, fmt::join(user.strides(), ", ")));
}

}  // namespace

std::optional<Dtype> wire_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return Dtype::Float32;
    case at::kDouble:
    case at::kComplexDouble:
      return Dtype::Float64;
    case at::kBFloat16:
      return Dtype::BFloat16;
    case at::kHalf:
      return Dtype::Float16;
    case at::kChar:
      return Dtype::Int8;
    case at::kByte:
      return Dtype::UInt8;
    case at::kShort:
      return Dtype::Int16;
    case at::kInt:
      return Dtype::Int32;
    case at::kLong:
      return Dtype::Int64;
    case at::kBool:
      return Dtype::Bool;
    case at::kFloat8_e4m3fn:
      return Dtype::Float8E4M3;
    case at::kFloat8_e5m2:
      return Dtype::Float8E5M2;
    default:
      return std::nullopt;
  }
}

void copy_back_after(BackendCall& call, const std::vector<Operand>& operands) {
  std::vector<Operand> copies;
  for (const Operand& operand : operands) {
    if (operand.is_copy) copies.push_back(operand);
  }
  if (copies.empty()) return;
  call.on_success = [before = std::move(call.on_success), copies = std::move(copies)] {
    if (before) before();
    for (const Operand& operand : copies) copy_back(operand);
  };
}

std::string OperationSite::first_argument() const {
  return tensor == nullptr ? "a tensor" : "argument " + describe(argument, *tensor);
}

std::string describe(const char* argument, const at::Tensor& tensor) {
  return fmt::format("{} {} [{}]", argument, type_text(tensor), fmt::join(tensor.sizes(), ", "));
}

Operand make_operand(OperationSite& site, const char* argument, const at::Tensor& tensor,
                     Access access) {
  check_storage(site, argument, tensor);
  const std::optional<Dtype> dtype = wire_dtype(tensor.scalar_type());
  // Kernels of the host add no 8-bit floats.
  if (!dtype || (is_float8(*dtype) && tensor.is_cpu())) {
    site.refuse(fmt::format("argument {} has a dtype that a group does not move",
                            describe(argument, tensor)),
                "to move bytes, pass tensor.view(torch.uint8)");
  }
  if (access != Access::Read) check_writable(site, argument, tensor);
  Operand operand{tensor, tensor, *dtype};
  const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  if (is_plain && !tensor.is_complex()) return operand;

  Quiet quiet;
  if (!is_plain) {
    operand.is_copy = true;
    operand.wire = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    if (access != Access::Write) operand.wire.copy_(tensor);
    if (access != Access::Read && at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      operand.repeating = fmt::format("{} {}: argument {}", site.group.where(), site.operation,
                                      describe(argument, tensor));
    }
  }
  if (tensor.is_complex()) operand.wire = at::view_as_real(operand.wire);
  return operand;
}

std::vector<Operand> make_operands(OperationSite& site, const char* argument,
                                   const std::vector<at::Tensor>& tensors, Access access) {
  std::vector<Operand> operands;
  operands.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    operands.push_back(make_operand(site, argument, tensor, access));
    check_same_dtype(site, argument, tensor, argument, tensors.front());
  }
  return operands;
}

std::vector<at::Tensor> wires(const std::vector<Operand>& operands) {
  std::vector<at::Tensor> result;
  result.reserve(operands.size());
  for (const Operand& operand : operands) result.push_back(operand.wire);
  return result;
}

std::int64_t total_numel(const std::vector<Operand>& operands) {
  std::int64_t numel = 0;
  for (const Operand& operand : operands) numel += operand.wire.numel();
  return numel;
}

bool have_one_size(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors.front().numel();
  });
}

at::Tensor adjacent_view(const std::vector<at::Tensor>& tensors) {
  std::int64_t numel = 0;
  const at::Tensor& first = tensors.front();
  for (const at::Tensor& tensor : tensors) {
    const bool follows = tensor.storage().is_alias_of(first.storage()) &&
                         tensor.storage_offset() == first.storage_offset() + numel;
    if (!follows) return {};
    numel += tensor.numel();
  }
  Quiet quiet;
  return at::as_strided(first, {numel}, {1}, first.storage_offset());
}

namespace {

/// Contiguous tensors in the dtype of `flat`: bytes, where that is one of bytes.
std::vector<at::Tensor> as_elements_of(const at::Tensor& flat,
                                       const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> elements;
  for (const at::Tensor& tensor : tensors) {
    const bool is_alike = tensor.scalar_type() == flat.scalar_type();
    elements.push_back(is_alike ? tensor : tensor.view({-1}).view(flat.scalar_type()));
  }
  return elements;
}

/// Where each of `tensors` lies in `flat`, in its own shape.
std::vector<at::Tensor> places_in(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> places;
  std::int64_t begin = 0;
  for (const at::Tensor& tensor : tensors) {
    places.push_back(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  return places;
}

}  // namespace

void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& flat) {
  if (!flat.device().is_cpu()) {
    Quiet quiet;
    const std::vector<at::Tensor> elements = as_elements_of(flat, tensors);
    return at::_foreach_copy_(places_in(flat.view({-1}), elements), elements);
  }
  auto* target = static_cast<std::byte*>(flat.data_ptr());
  for (const at::Tensor& tensor : tensors) {
    copy_part(target, tensor.const_data_ptr(), tensor.nbytes(), flat.nbytes());
    target += tensor.nbytes();
  }
}

void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  if (!flat.device().is_cpu()) {
    Quiet quiet;
    const std::vector<at::Tensor> elements = as_elements_of(flat, tensors);
    return at::_foreach_copy_(elements, places_in(flat.view({-1}), elements));
  }
  const auto* source = static_cast<const std::byte*>(flat.const_data_ptr());
  for (const at::Tensor& tensor : tensors) {
    copy_part(tensor.data_ptr(), source, tensor.nbytes(), flat.nbytes());
    source += tensor.nbytes();
  }
}

}  // namespace libddp
