#pragma once

// A tensor, or a range of one, as a rank gives it to a snapshot or wants it back.
// Thread rule: values.
//
//   SnapshotTensor{.key = "model.weight", .tensor = weight, .shape = {4, 4}, .begin = 0, .end = 8,
//                  .stored_by = StoredBy::EachRank}

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace libddp {

/// Who puts it into a snapshot.
enum class StoredBy {
  /// The rank that gives it: other ranks have other elements, or keys of their own.
  EachRank,
  /// The first rank of each host: the others have something like it, and theirs is not kept.
  FirstOfHost,
  /// The ranks of each host, a part each: it is the same on all of them, bit for bit.
  HostTogether,
};

struct SnapshotTensor {
  std::string key;
  /// Elements [begin, end) of the whole tensor, in C order; strided, on any device.
  at::Tensor tensor;
  /// Of the whole tensor.
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  StoredBy stored_by = StoredBy::EachRank;

  /// All of `tensor` under a key.
  static SnapshotTensor whole(std::string key, at::Tensor tensor,
                              StoredBy stored_by = StoredBy::FirstOfHost);
  /// Throws ArgumentError with the key for what cannot be stored: sparse, meta and quantized
  /// tensors, types that safetensors has no name for, a range of another size than the tensor.
  void check() const;
};

/// The name that safetensors has for a dtype; empty if it has none.
std::string_view stored_dtype(at::ScalarType dtype);
/// And back. Throws SnapshotError for a name that torch has no type for.
at::ScalarType scalar_type_of(std::string_view stored_dtype);

}  // namespace libddp
