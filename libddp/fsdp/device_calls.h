#pragma once

// NOTE [Ranks that run different units]
// Units are often alike, in name and size too (experts, blocks wrapped one by one). Each
// collective of units has their places in the model in its label, so ranks that have run different
// ones are told so, and nothing is added to what does not belong to it.
//
// On a device nobody compares what the ranks call, and collectives that do not belong together hang
// or add up. There each forward and each pass ends with a word of the host's, which nobody waits
// for, about the units that ran in it: these are the calls that DeviceCalls keeps.
// Thread rule: one thread at a time.
//
//   DeviceCalls calls(device_ranks_of(units));
//   calls.note(unit, DeviceCalls::Call::Forward);
//   calls.compare("a forward");   // a collective of the ranks

#include <cstdint>
#include <utility>

#include "libddp/fsdp/param_group.h"
#include "libddp/group/process_group.h"

namespace libddp {

class DeviceCalls {
 public:
  enum class Call : std::uint8_t { Forward, Backward, Average };

  /// `ranks`: those that share units on a device. Without them nothing is kept or compared.
  explicit DeviceCalls(Group ranks) : ranks_(std::move(ranks)) {}

  void note(const ParamGroup& unit, Call call);
  /// `when`, in words, is what has ended: for the error of ranks whose calls differ, which is the
  /// next collective's.
  void compare(const char* when);
  void forget() { calls_ = 0; }

 private:
  const Group ranks_;
  /// What ran since the last comparison.
  std::uint64_t calls_ = 0;
};

}  // namespace libddp
