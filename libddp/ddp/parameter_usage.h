#pragma once

// Which parameters this rank's pass has gradients for, and what becomes of the others: their pieces
// of the buckets are filled, the flags behind the gradients tell the other ranks of them, and at
// the end of the pass they get what others have averaged, or are refused.
//
// NOTE [Missing gradients on a device]
// Nobody waits for the flags in a step whose ranks must have all gradients: the message about them
// is sent at the end of the pass and looked at before the next one, as in torch. Waited for at once
// it is by a rank that lacks a gradient itself, where parameters may stay unused, and by all in the
// first pass, after which the ranks agree on the buckets.
// Thread rule: as Reducer, and `fill` from the thread that sends the bucket.
//
//   ParameterUsage usage(group, pass, slots, options.find_unused_parameters);
//   usage.fill(buckets, 0, true);                                // before the bucket is sent
//   is_missing = usage.share(buckets, false);                    // where the flags stay here
//   if (is_missing && !usage.tolerates_unused()) usage.refuse_unused();
//   usage.install_gradients_of_others(buckets);

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "libddp/ddp/backward_pass.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/gradient_slots.h"
#include "libddp/ddp/missing_gradients.h"
#include "libddp/ddp/sparse_gradients.h"
#include "libddp/group/process_group.h"

namespace libddp {

class ParameterUsage {
 public:
  ParameterUsage(Group group, const BackwardPass& pass, GradientSlots& slots,
                 bool tolerates_unused);

  /// Parameters may stay without a gradient: buckets have a flag for each of theirs.
  bool tolerates_unused() const { return tolerates_unused_; }
  /// For the buckets that are built from now on.
  void tolerate_unused() { tolerates_unused_ = true; }

  bool is_used(std::size_t index) const {
    const bool has_fired = pass_.num_fired(index) > 0 && !slots_.has_got_none(index);
    return has_fired || slots_.has_own(index);
  }
  bool is_any_used(const std::vector<std::size_t>& parameters) const;
  /// What this rank has for parameters without a bucket.
  std::vector<SparseGradients::Share> shares_of(const std::vector<std::size_t>& parameters) const;

  /// ENSURES: the bucket has something for each of its parameters, and this rank's flags. Where
  /// nobody reads it, a bucket on a device may be left as it is.
  void fill(GradientBuckets& buckets, std::size_t bucket, bool is_read);
  /// Collective, at the end of a pass whose flags have not travelled with the buckets: tells them.
  /// Returns whether some rank has no gradient for some parameter, as far as it is known now.
  /// `at_once`: it is to be known; the same on all ranks.
  bool share(GradientBuckets& buckets, bool at_once);
  /// Before the next pass: throws as refuse_unused where the last one's message says so.
  void check_shared();
  /// After a pass: `.grad` becomes the average where only other ranks have used the parameter.
  /// REQUIRES: buckets with flags of all ranks, for each parameter.
  void install_gradients_of_others(const GradientBuckets& buckets);
  /// Collective, unless the message has come: throws StateError, which names the parameters and
  /// ranks without a gradient; the same ones on every rank. The pass is over for the gradients.
  [[noreturn]] void refuse_unused();

 private:
  std::vector<std::uint8_t> unused_here() const;
  std::string describe_unused(const std::vector<std::uint8_t>& of_all) const;

  const Group group_;
  const BackwardPass& pass_;
  GradientSlots& slots_;
  bool tolerates_unused_;
  MissingGradients missing_;
  /// What has been heard and not been refused yet.
  std::vector<std::uint8_t> heard_;
};

/// Whether some flag says so.
bool is_any_missing(const GradientBuckets& buckets);

}  // namespace libddp
