#pragma once

// Which parameters require gradients, as a label of a collective: ranks that have not frozen the
// same ones differ in it, and the collective says so instead of adding what does not belong
// together.
// Thread rule: plain data.
//
//   TrainedSet trained;
//   for (const at::Tensor& p : parameters) trained.add(p.requires_grad());
//   group->barrier({.label = trained.label("a forward")});   // "trains 3 of 5 (9af1): a forward"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace libddp {

class TrainedSet {
 public:
  void add(bool is_trained) {
    ++size_;
    count_ += is_trained;
    mix(1 + is_trained);
  }
  void add(const TrainedSet& further) {
    size_ += further.size_;
    count_ += further.count_;
    mix(further.hash_);
  }

  bool is_none() const { return count_ == 0; }
  bool is_all() const { return count_ == size_; }
  /// `what` alone where all are trained.
  std::string label(const std::string& what) const {
    if (is_all()) return what;
    return fmt::format("trains {} of {} ({:04x}): {}", count_, size_, hash_ >> 48, what);
  }

 private:
  void mix(std::uint64_t value) { hash_ = (hash_ + value) * 0x9E3779B97F4A7C15u; }

  std::size_t size_ = 0;
  std::size_t count_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace libddp
