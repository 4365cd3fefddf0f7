#pragma once

// A rank's end of a mock communicator: what ncclComm_t points to. Never freed, so that a call after
// its end finds out.
// Thread rule: any thread.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/fakegpu/device_stream.h"
#include "tests/fakegpu/nccl_wire.h"

namespace mock_nccl {

/// One call of an operation.
struct OpCall {
  WireCall wire;
  const void* send;
  void* recv;
  /// PreMulSum: what the rank's elements are multiplied with before they are added.
  std::vector<char> factor;
};

class Communicator {
 public:
  Communicator(int rank, int num_ranks);
  ~Communicator();

  /// Blocks until all ranks have come, or until an abort: false.
  bool connect(const std::string& name);

  /// What each operation counts as writing: libddp orders those of a communicator by itself, on
  /// whatever streams they are, and the race checker tells where it does not.
  const void* turn() const { return &turn_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  /// Counts those of the process.
  int number() const { return number_; }
  bool is_usable() const;
  bool is_connected() const;

  /// The ranks' calls, as one operation on the stream. `hangs`: until an abort.
  void issue(fakegpu::DeviceStream& stream, std::vector<OpCall> calls, bool hangs, int delay_ms);
  /// From any thread: ends what runs and what was issued.
  void abort();
  /// Waits for what was issued.
  void destroy();
  /// Of what a rank does before it is connected.
  void hang_until_abort();

  std::atomic<ncclResult_t> async_error{ncclSuccess};

 private:
  enum class State { kConnecting, kConnected, kAborted, kDestroyed };

  void execute(std::uint64_t turn, const std::vector<OpCall>& calls, bool hangs, int delay_ms);
  void exchange(const std::vector<OpCall>& calls);
  /// Ends the connection; its descriptor goes once no thread uses it.
  void shut_down();
  void end_use();
  bool is_ended() const { return state_ == State::kAborted || state_ == State::kDestroyed; }

  const int rank_;
  const int num_ranks_;
  const int number_;
  const char turn_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kConnecting;
  int socket_ = -1;
  /// A thread sends or receives.
  bool is_in_use_ = false;
  std::uint64_t num_issued_ = 0;
  /// Operations run in the order of their issue, on whatever stream.
  std::uint64_t num_done_ = 0;
};

}  // namespace mock_nccl
