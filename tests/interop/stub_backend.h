#pragma once

// A c10d backend of somebody else for tests, as small as it may be: one without deadlines whose
// operations do not end, and one that passes on to Gloo and counts.
//
//   auto stuck = c10::make_intrusive<StuckBackend>(0, 2);
//   from_c10d(stuck)->barrier({.timeout = 200ms});   // TimeoutError

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace libddp::test {

/// Ends when `release` is called, whatever deadline it is given.
class StuckWork final : public c10d::Work {
 public:
  explicit StuckWork(std::shared_ptr<std::atomic<bool>> is_over) : is_over_(std::move(is_over)) {}
  bool isCompleted() override { return *is_over_; }
  bool wait(std::chrono::milliseconds /*ignored*/) override {
    is_over_->wait(false);
    return true;
  }

 private:
  const std::shared_ptr<std::atomic<bool>> is_over_;
};

class StuckBackend final : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  ~StuckBackend() override { release(); }
  const std::string getBackendName() const override { return "stuck"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& /*tensors*/,
                                           const c10d::AllreduceOptions& /*options*/) override {
    return work();
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    return work();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& /*tensors*/, int /*source*/,
                                      int /*tag*/) override {
    return work();
  }

  /// All that is under way ends.
  void release() {
    *is_over_ = true;
    is_over_->notify_all();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work() { return c10::make_intrusive<StuckWork>(is_over_); }

  const std::shared_ptr<std::atomic<bool>> is_over_ = std::make_shared<std::atomic<bool>>(false);
};

/// Without a reduce-scatter of its own if so made.
class CountingBackend final : public c10d::Backend {
 public:
  CountingBackend(c10::intrusive_ptr<c10d::Backend> below, bool has_reduce_scatter,
                  std::atomic<int>& num_all_reduces, std::atomic<int>& num_reduce_scatters)
      : c10d::Backend(below->getRank(), below->getSize()),
        below_(std::move(below)),
        has_reduce_scatter_(has_reduce_scatter),
        num_all_reduces_(num_all_reduces),
        num_reduce_scatters_(num_reduce_scatters) {}
  const std::string getBackendName() const override { return "counting"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    ++num_all_reduces_;
    return below_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (!has_reduce_scatter_) return c10d::Backend::_reduce_scatter_base(output, input, options);
    ++num_reduce_scatters_;
    return below_->_reduce_scatter_base(output, input, options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> below_;
  const bool has_reduce_scatter_;
  std::atomic<int>& num_all_reduces_;
  std::atomic<int>& num_reduce_scatters_;
};

}  // namespace libddp::test
