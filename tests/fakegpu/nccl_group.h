#pragma once

// ncclGroupStart and ncclGroupEnd of a thread: operations are collected and then issued together,
// one operation per communicator.

#include <string>
#include <vector>

#include "libddp/cuda/nccl_header.h"
#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/nccl_communicator.h"

namespace mock_nccl {

class Group {
 public:
  /// The calling thread's.
  static Group& current();

  void start() { ++depth_; }
  /// Issues at the outermost end; gives what a call in the group failed with.
  ncclResult_t end();
  ncclResult_t add(const std::string& function, Communicator& communicator,
                   fakegpu::DeviceStream& stream, OpCall call);
  /// Of a call in the group that was refused; outside of one, nothing.
  ncclResult_t refuse(ncclResult_t error);

 private:
  struct Pending {
    std::string function;
    Communicator* communicator;
    fakegpu::DeviceStream* stream;
    OpCall call;
  };

  ncclResult_t issue();
  static void issue_together(const std::vector<Pending>& calls);

  int depth_ = 0;
  ncclResult_t error_ = ncclSuccess;
  std::vector<Pending> pending_;
};

}  // namespace mock_nccl
