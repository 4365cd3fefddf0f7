#pragma once

// The meeting place of one communicator: it takes each rank's calls, answers those that match, and
// leaves the others unanswered. It runs in threads of the process that made the unique id, as
// NCCL's bootstrap does; that process waits at its exit for ranks that are still connected.

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakegpu/nccl_wire.h"

namespace mock_nccl {

class Server : public std::enable_shared_from_this<Server> {
 public:
  /// Serves until all ranks that came have left.
  static void start(const std::string& name);

 private:
  /// What a rank has issued together, and is answered together.
  struct Batch;
  struct Call {
    WireCall wire;
    std::vector<char> sent;
    std::vector<char> result;
    Batch* batch;
  };
  struct Batch {
    int rank;
    std::deque<Call> calls;
    std::size_t num_open;
  };
  using Calls = std::deque<Call*>;
  using Pair = std::pair<int, int>;  // from, to

  void accept_ranks(int listener);
  void serve(int rank, int socket);
  /// Null: the rank has left.
  std::unique_ptr<Batch> read(int rank, int socket) const;
  void add(std::unique_ptr<Batch> batch);
  bool match_collective();
  bool match_pair(const Pair& pair);
  void compute(const Calls& calls);
  void finish(Call& call);
  void answer(Batch& batch);

  std::mutex mutex_;
  std::size_t num_ranks_ = 0;
  std::vector<int> sockets_;
  std::vector<Calls> collectives_;
  std::map<Pair, Calls> sends_;
  std::map<Pair, Calls> recvs_;
  std::map<Batch*, std::unique_ptr<Batch>> batches_;
  /// By rank: a rank waits for its batch before it sends the next.
  std::map<int, Batch*> finished_;
};

}  // namespace mock_nccl
