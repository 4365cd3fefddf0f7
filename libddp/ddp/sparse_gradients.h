#pragma once

// The parameters whose gradients are expected to be sparse COO tensors (embeddings with
// sparse=True), which stay out of the buckets: at the end of a pass that synchronises, their
// gradients are averaged together, in the same order on every rank.
//
// First the ranks tell each other what they have. A rank without a gradient counts as zero; a
// parameter that no rank used keeps its `.grad`. Where a rank's gradient is dense (the weight also
// served a layer that is not sparse), all ranks average dense ones. Otherwise all entries travel
// together, see sparse_all_reduce.h. Afterwards `.grad` is a new coalesced tensor, with equal bits
// on every rank.
// Thread rule: as Reducer.
//
//   SparseGradients sparse(parameters, {"embedding.weight"}, group);
//   sparse.check(index);   // in the gradient's hook, where sparse.contains(index)
//   bool is_missing = sparse.average(shares, 1.0);

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "libddp/group/process_group.h"
#include "libddp/module/named_tensor.h"

namespace libddp {

class SparseGradients {
 public:
  /// What a rank's pass did for a parameter. Absent: the rank has no data, see
  /// Reducer::run_empty_pass.
  enum class Share : std::uint8_t { Missing, Used, Absent };
  /// What takes the place of averaging: own gradient in, what shall stand there out.
  using Exchange = std::function<at::Tensor(std::size_t position, const at::Tensor& own,
                                            const NamedTensor& parameter)>;

  /// `names`: those of `parameters` that are meant; others are ignored.
  SparseGradients(const NamedTensors& parameters, const std::vector<std::string>& names,
                  Group group);

  bool contains(std::size_t index) const { return is_sparse_[index]; }
  /// Indices of the parameters, ascending.
  const std::vector<std::size_t>& indices() const { return indices_; }

  /// Throws ArgumentError naming the parameter where its gradient is neither sparse COO nor dense,
  /// or has another dtype or device than the parameter had. Converts a gradient of the other dtype
  /// that is welcome.
  void check(std::size_t index) const;
  /// Gradients of this dtype are welcome too.
  void also_accept(c10::ScalarType dtype) { also_accepted_ = dtype; }
  /// From now on gradients have the dtypes that the parameters have now.
  void follow_dtypes();

  /// Collective: every `.grad` that some rank used becomes the average over all ranks times
  /// `scale`. `shares`: one per index. Returns whether some rank's share is Missing.
  bool average(const std::vector<Share>& shares, double scale);
  /// The same with another exchange, which gets each parameter in each pass, and a tensor of its
  /// own: sparse and coalesced, or dense where some rank's gradient is.
  bool exchange(const std::vector<Share>& shares, const Exchange& exchange_one);

 private:
  /// What all ranks know about a parameter's gradients in this pass.
  struct Agreed {
    bool is_missing = false;
    bool is_used = false;
    bool is_dense = false;
    std::uint8_t sparse_dim = 1;
  };

  std::vector<Agreed> agree(const std::vector<Share>& shares);
  at::Tensor contribution(std::size_t position, const Agreed& agreed, Share share) const;
  void average_sparse(const std::vector<std::size_t>& positions,
                      const std::vector<at::Tensor>& contributions, double scale);
  void average_dense(std::size_t position, const at::Tensor& contribution, double scale);
  static bool is_missing(const std::vector<Agreed>& agreed);
  const NamedTensor& parameter(std::size_t position) const { return parameters_[position]; }
  void install(std::size_t position, at::Tensor gradient);

  const Group group_;
  std::vector<bool> is_sparse_;
  std::vector<std::size_t> indices_;
  /// Those of `indices_`, and their dtypes; a parameter itself may have another one for a while.
  NamedTensors parameters_;
  std::vector<c10::ScalarType> dtypes_;
  std::optional<c10::ScalarType> also_accepted_;
};

}  // namespace libddp
