#pragma once

// This rank's copy of a model under DistributedDataParallel: what the C++ and the Python class have
// in common. Checks at start that all ranks wrap the same model, makes all of them start from rank
// 0's values, broadcasts buffers, and owns the Reducer.
// Thread rule: one forward or backward at a time; not to be destroyed during a backward pass.
//
//   Replica replica(parameters, buffers, group, {});
//   replica.broadcast(buffer_tensors);      // before a forward, where it is due
//   auto y = net->forward(x);
//   bool synchronises = replica.after_forward({y}, true);

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "libddp/ddp/broadcast_tensors.h"
#include "libddp/ddp/named_tensor.h"
#include "libddp/ddp/reducer.h"
#include "libddp/group/process_group.h"

namespace libddp {

struct DistributedDataParallelOptions {
  /// Largest bucket, and the first one, which is small so that communication starts early.
  std::size_t cap_bytes = std::size_t{25} << 20;
  std::size_t first_bytes = std::size_t{1} << 20;
  bool find_unused_parameters = false;
  bool static_graph = false;
  /// Names of parameters whose gradients are sparse COO tensors; see sparse_gradients.h.
  std::vector<std::string> sparse_parameters{};
  /// Before the first forward, and before each one that follows a synchronising one.
  bool broadcast_buffers = true;
  /// Check that the ranks agree, and start all of them from rank 0's values.
  bool init_sync = true;
};

class Replica {
 public:
  using Rethrow = std::function<void(std::exception_ptr)>;

  /// Collective if options.init_sync. `parameters`: all of them, frozen ones too.
  /// Throws ArgumentError where no parameter requires a gradient, where one is not on the CPU,
  /// where options.sparse_parameters has a name that `parameters` lacks, and where the ranks wrap
  /// different models.
  Replica(NamedTensors parameters, const NamedTensors& buffers, Group group,
          const DistributedDataParallelOptions& options, Rethrow rethrow = nullptr);

  /// Collective: every rank gets the values of `root` (buffers before a forward, or the model).
  void broadcast(const std::vector<at::Tensor>& tensors, int root = 0);

  /// After a forward that returned `outputs`. Returns whether its backward synchronises: it does
  /// if `sync` and gradients are recorded.
  bool after_forward(const std::vector<at::Tensor>& outputs, bool sync);

  void set_static_graph() { reducer_->set_static_graph(); }
  Reducer& reducer() { return *reducer_; }
  const Group& group() const { return group_; }

 private:
  void check_parameters() const;
  void check_sparse_names(const std::vector<std::string>& names) const;
  void check_requires_grad() const;

  const NamedTensors parameters_;
  const Group group_;
  std::vector<bool> requires_grad_;
  TensorBroadcaster broadcaster_;
  std::shared_ptr<Reducer> reducer_;
};

}  // namespace libddp
