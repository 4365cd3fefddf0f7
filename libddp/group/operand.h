#pragma once

// A user's tensor made ready for a backend: dense, real, contiguous, on one device with the others.
//
// Complex tensors are seen as pairs of reals. A tensor that is not contiguous is copied: before the
// operation if it is read, after it if it is written. What no copy can make right (sparse, another
// device than the call's other tensors, a dtype that the library does not move) is an
// ArgumentError. So is writing to elements that share memory, by expand(): always on a device, and
// on the host where the result has several values for them; the group goes on then.
// Thread rule: free functions; the tensors belong to the caller.
//
//   Operand operand = make_operand(site, "tensor", tensor, Access::ReadWrite);
//   if (operand.is_copy) copy_back_after(call, {operand});
//   backend->all_reduce(std::move(call), operand.wire, 1.0);

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "libddp/base/dtype.h"
#include "libddp/base/group_identity.h"
#include "libddp/group/backend.h"
#include "libddp/group/operation_site.h"

namespace libddp {

enum class Access { Read, Write, ReadWrite };

struct Operand {
  at::Tensor user;
  /// Shares memory with `user` unless `is_copy`.
  at::Tensor wire;
  Dtype dtype = Dtype::UInt8;
  bool is_copy = false;
  /// "libddp[group world, rank 0/2] all_reduce: argument tensor float32 [3]": where a result that
  /// is copied back may not fit, since elements of `user` share memory; else empty.
  std::string repeating{};
};

/// The library's name for a dtype; complex ones give that of their parts. nullopt = not moved.
std::optional<Dtype> wire_dtype(at::ScalarType type);

Operand make_operand(OperationSite& site, const char* argument, const at::Tensor& tensor,
                     Access access);

/// Those of a list, of one dtype; their tensors as they travel, and how many elements these have.
std::vector<Operand> make_operands(OperationSite& site, const char* argument,
                                   const std::vector<at::Tensor>& tensors, Access access);
std::vector<at::Tensor> wires(const std::vector<Operand>& operands);
std::int64_t total_numel(const std::vector<Operand>& operands);

/// Whether all of them have equally many elements.
bool have_one_size(const std::vector<at::Tensor>& tensors);

/// Lets a call end with bringing the result into the tensors that were not contiguous.
void copy_back_after(BackendCall& call, const std::vector<Operand>& operands);

/// `output float32 [2, 3]`, for messages.
std::string describe(const char* argument, const at::Tensor& tensor);

/// One flat tensor over `tensors` if they lie back to back in one storage; undefined otherwise.
at::Tensor adjacent_view(const std::vector<at::Tensor>& tensors);

/// Copies contiguous tensors into `flat` (of their dtype, or of bytes) one after another, and back;
/// on a device in the order of the current stream, by one launch.
void pack(const std::vector<at::Tensor>& tensors, const at::Tensor& flat);
void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

}  // namespace libddp
