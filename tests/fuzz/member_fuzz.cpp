// What a reconfigurable group reads of others: handles that a program passes on, and arrivals in
// the lead's store. What is understood can be written and read again, and is then the same; a plan
// of such handles has each of them once, this process's own among them.

#include <algorithm>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/host/reconfigure_arrival.h"
#include "libddp/host/reconfigure_plan.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

void check_handle(const std::string& text) {
  try {
    const MemberHandle handle = MemberHandle::decode(text);
    fuzz::require(handle.port > 0 && handle.pid > 0 && !handle.address.empty());
    const std::string once = handle.encode();
    // Written by this version, whose name may be the longer one.
    if (once.size() <= MemberHandle::kMaxBytes) {
      fuzz::require(MemberHandle::decode(once).encode() == once);
    }
    fuzz::require(printable(handle.who()) == handle.who());
  } catch (const ArgumentError& error) {
    // Shown to whoever passed it, whatever it holds.
    fuzz::require(printable(error.what()) == error.what());
  }
}

void check_arrival(const std::string& text, const ReconfigureArrival& mine) {
  try {
    const ReconfigureArrival theirs = ReconfigureArrival::decode(text);
    const std::string once = theirs.encode();
    fuzz::require(ReconfigureArrival::decode(once).encode() == once);
    fuzz::require(theirs.is_same_round(theirs));
    fuzz::require(theirs.is_same_round(mine) == mine.is_same_round(theirs));
    if (!theirs.is_same_round(mine)) fuzz::require(!theirs.difference(mine).empty());
  } catch (const StoreError&) {
  }
}

/// Handles, of which the first is this process's own.
ReconfigureArrival check_plan(const std::vector<std::string>& handles, bool is_ordered) {
  try {
    const ReconfigurePlan plan({.uuid = 7, .handles = handles, .is_ordered = is_ordered},
                               handles.front());
    fuzz::require(plan.world_size() == static_cast<int>(handles.size()));
    fuzz::require(plan.own().instance == MemberHandle::decode(handles.front()).instance);
    for (const MemberHandle& member : plan.members()) {
      fuzz::require(plan.lead().instance <= member.instance);
    }
    if (is_ordered) fuzz::require(plan.rank() == 0);
    return ReconfigureArrival::of(plan);
  } catch (const ArgumentError&) {
    return {.uuid = 7, .world_size = 1, .digest = std::string(16, '0')};
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes input(data, size);
  const bool is_ordered = input.piece().empty();
  const std::string arrival = input.piece();
  std::vector<std::string> handles;
  while (handles.empty() || !input.is_empty()) handles.push_back(input.piece());
  check_arrival(arrival, check_plan(handles, is_ordered));
  for (const std::string& handle : handles) check_handle(handle);
  check_handle(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
