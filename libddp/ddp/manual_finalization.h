#pragma once

// Passes that the caller ends (torch's `require_manual_backward_finalization`): when autograd is
// done, what is left is sent, and a call of the caller waits for it and puts the averages into
// place. Whether that is so, and when that call is due.
//
// Thread rule: as Reducer.
//
//   ManualFinalization manual("libddp[group world, rank 0/2]", pass);
//   manual.set(true);
//   if (manual.is_on()) return launcher.launch_rest(true);        // autograd is done
//   manual.check_may_finalize(is_complete, needs_pass_end);       // the caller's call

#include <string>

#include "libddp/ddp/backward_pass.h"

namespace libddp {

class ManualFinalization {
 public:
  /// `who` begins the messages of errors.
  ManualFinalization(std::string who, const BackwardPass& pass);

  bool is_on() const { return is_on_; }
  /// Throws StateError in a pass.
  void set(bool on);
  /// Throws StateError where the pass that runs must not, or not yet, be ended by hand.
  /// `is_complete`: all gradients are there. `needs_pass_end`: autograd must be done.
  void check_may_finalize(bool is_complete, bool needs_pass_end) const;
  /// Throws StateError where a pass has not been finished.
  void check_finalized() const;

 private:
  const std::string who_;
  const BackwardPass& pass_;
  bool is_on_ = false;
};

}  // namespace libddp
