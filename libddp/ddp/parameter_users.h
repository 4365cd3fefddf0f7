#pragma once

// What those that average a parameter's gradient know of each other, where a script wraps one
// parameter more than once: an encoder under two heads, a model and a part of it, a model that is
// wrapped again.
//
// `.grad` can be a piece of one bucket only. Where a parameter has several users, it is a piece of
// none: each has a copy in its own bucket, from the moment that the gradient fires in a pass of its
// own, and brings the average back at the end. A user whose pass does not run leaves it alone.
// Thread rule: users may come and go in any thread; `is_common` and `is_in_pass` take no lock.
//
//   ParameterUser user(parameter);               // counted while it lives
//   if (user.is_common()) copy_into_bucket();
//   ParameterPass pass(slots);                   // while a backward pass of this user runs

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <vector>

namespace libddp {

class ParameterUser {
 public:
  explicit ParameterUser(const at::Tensor& parameter);
  ParameterUser(ParameterUser&&) noexcept = default;
  ParameterUser& operator=(ParameterUser&&) = delete;
  ~ParameterUser();

  /// Whether any parameter of the process has several users.
  static bool is_any_common() { return num_common.load(std::memory_order_relaxed) > 0; }
  /// Whether there are others.
  bool is_common() const {
    return is_any_common() && counts_->num_users.load(std::memory_order_relaxed) > 1;
  }
  /// Whether a backward pass of some user runs.
  bool is_in_pass() const { return counts_->num_passes.load(std::memory_order_relaxed) > 0; }
  /// This one cannot share the parameter with others.
  void claim();
  /// Whether there are others, and one of all claims it.
  bool is_disputed() const;

 private:
  friend class ParameterPass;

  struct Counts {
    std::atomic<int> num_users{0};
    std::atomic<int> num_claims{0};
    std::atomic<int> num_passes{0};
  };
  static std::shared_ptr<Counts> counts_of(const at::Tensor& parameter);
  /// Parameters that have several.
  static std::atomic<int> num_common;

  /// Null where it was moved from.
  std::shared_ptr<Counts> counts_;
  bool has_claimed_ = false;
};

/// A backward pass that runs, for those parameters that are common.
class ParameterPass {
 public:
  ParameterPass() = default;
  ParameterPass(const ParameterPass&) = delete;
  ParameterPass& operator=(const ParameterPass&) = delete;
  ~ParameterPass();

  void add(const ParameterUser& user);

 private:
  std::vector<std::shared_ptr<ParameterUser::Counts>> counts_;
};

}  // namespace libddp
