#pragma once

// What moves bytes for a ProcessGroup on one kind of device. Arguments arrive validated, contiguous
// and numbered; a backend adds nothing to their meaning.
//
// Thread rule: ProcessGroup serialises calls per group; `abort` may come from any thread.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "libddp/collectives/op_description.h"
#include "libddp/group/work.h"

namespace libddp {

/// One numbered operation on its way to a backend.
struct BackendCall {
  OpDescription description;
  std::uint64_t sequence = 0;
  std::chrono::milliseconds timeout{};
  /// false: the operation may run inline and the returned Work is already done.
  bool async = false;
};

/// One part of a batched exchange.
struct Exchange {
  enum class Direction { Send, Recv };
  Direction direction = Direction::Send;
  at::Tensor tensor;
  /// Rank in the group; -1 on a receive = any source.
  int peer = 0;
  int tag = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string name() const = 0;

  /// In place; `scale` multiplies the result.
  virtual WorkPtr all_reduce(const BackendCall& call, const at::Tensor& tensor, double scale) = 0;
  virtual WorkPtr broadcast(const BackendCall& call, const at::Tensor& tensor, int root) = 0;
  /// `output` = world_size blocks shaped like `input`, flattened.
  virtual WorkPtr all_gather(const BackendCall& call, const at::Tensor& output,
                             const at::Tensor& input) = 0;
  virtual WorkPtr reduce_scatter(const BackendCall& call, const at::Tensor& output,
                                 const at::Tensor& input, double scale) = 0;
  virtual WorkPtr exchange(const BackendCall& call, std::vector<Exchange> parts) = 0;
  virtual WorkPtr barrier(const BackendCall& call) = 0;

  /// Uninitialised tensor in memory that the backend communicates fastest.
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;

  /// Ends every operation in flight, here and soon on the peers, with `reason`.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Null while the backend is healthy.
  virtual std::exception_ptr failure() const = 0;
  /// Orderly end of this rank: waits for operations in flight, then leaves.
  virtual void shutdown() = 0;
};

}  // namespace libddp
