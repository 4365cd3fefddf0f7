#pragma once

// The small store that a process of a reconfigurable group holds, so that whoever has its handle
// can meet it, whatever has become of the store that the group was started with.
//
// A TCPStore of torch's on a free port. It listens at one address: what LIBDDP_SOCKET_IFNAME names;
// else at loopback where the group was started over loopback, so that only this host can come; else
// at the address that other hosts reach this one by (transport/network_interface.h). As with any
// store of a start, who can reach the port can write to it: with a run key, only entries of those
// who have it are believed.
// Thread rule: any thread.
//
//   MemberStore store(store_host(given), "", std::chrono::seconds(30));
//   std::string handle = store.handle();

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/process.h"

namespace libddp {

class MemberStore {
 public:
  /// `route_to`: host of the store that the group was started over; may be empty. Throws
  /// NetworkError where it cannot listen, ArgumentError for a variable that fits no interface.
  MemberStore(const std::string& route_to, const std::string& host_identity,
              std::chrono::milliseconds timeout);
  ~MemberStore();
  MemberStore(const MemberStore&) = delete;
  MemberStore& operator=(const MemberStore&) = delete;

  /// The text for the others; the same as long as it lives.
  const std::string& handle() const { return handle_; }

 private:
  const ProcessStamp made_;
  c10::intrusive_ptr<c10d::Store> server_;
  std::string handle_;
};

}  // namespace libddp
