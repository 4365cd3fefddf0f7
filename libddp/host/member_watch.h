#pragma once

// Says at once that a process of this machine, which the others are about to meet, has ended: they
// would wait for it until their deadline. Those of other machines and pid namespaces are not seen.
// Thread rule: one thread.
//
//   MemberWatch watch(plan);
//   watch.throw_if_ended();      // PeerError names rank and pid

#include <vector>

#include "libddp/host/reconfigure_plan.h"
#include "libddp/transport/process_handle.h"

namespace libddp {

class MemberWatch {
 public:
  /// `plan` outlives it. Throws as throw_if_ended.
  explicit MemberWatch(const ReconfigurePlan& plan);

  void throw_if_ended() const;

 private:
  [[noreturn]] void refuse(int rank) const;

  struct Watched {
    int rank = 0;
    ProcessHandle process;
  };

  const ReconfigurePlan& plan_;
  std::vector<Watched> watched_;
};

}  // namespace libddp
