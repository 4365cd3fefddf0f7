#include "tests/fakegpu/nccl_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/nccl_reduce.h"

namespace mock_nccl {
namespace {

/// Connected ranks that this process serves, and the process: a forked child serves none.
std::atomic<int> num_served{0};
std::atomic<pid_t> serving_process{0};

}  // namespace

void wait_for_ranks() {
  constexpr std::chrono::seconds kLongest(5);
  const auto end = std::chrono::steady_clock::now() + kLongest;
  while (serving_process == ::getpid() && num_served > 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Server::start(const std::string& name) {
  if (serving_process.exchange(::getpid()) != ::getpid()) {
    num_served = 0;
    std::atexit(&wait_for_ranks);
  }
  const int listener = listen_on(name);
  auto server = std::make_shared<Server>();
  std::thread([server, listener] { server->accept_ranks(listener); }).detach();
}

void Server::accept_ranks(int listener) {
  std::size_t num_came = 0;
  while (num_ranks_ == 0 || num_came < num_ranks_) {
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    WireHello hello{};
    if (!recv_all(socket, &hello, sizeof(hello))) {
      ::close(socket);
      continue;
    }
    const auto num_ranks = static_cast<std::size_t>(hello.num_ranks);
    if (num_ranks_ == 0) {
      num_ranks_ = num_ranks;
      sockets_.assign(num_ranks, -1);
      collectives_.resize(num_ranks);
    }
    const auto rank = static_cast<std::size_t>(hello.rank);
    // Who disagrees waits for ever, and so do the others.
    if (num_ranks != num_ranks_ || rank >= num_ranks || sockets_[rank] >= 0) continue;
    sockets_[rank] = socket;
    ++num_came;
    ++num_served;
  }
  ::close(listener);
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
    const int socket = sockets_[rank];
    std::thread([server = shared_from_this(), rank, socket] {
      server->serve(static_cast<int>(rank), socket);
    }).detach();
  }
}

void Server::serve(int rank, int socket) {
  const char all_came = 1;
  bool is_here = send_all(socket, &all_came, 1);
  while (is_here) {
    std::unique_ptr<Batch> batch = read(rank, socket);
    is_here = batch != nullptr;
    if (is_here) add(std::move(batch));
  }
  const std::lock_guard lock(mutex_);
  sockets_[static_cast<std::size_t>(rank)] = -1;
  ::close(socket);
  --num_served;
}

std::unique_ptr<Server::Batch> Server::read(int rank, int socket) const {
  std::uint32_t num_calls = 0;
  if (!recv_all(socket, &num_calls, sizeof(num_calls))) return nullptr;
  auto batch = std::make_unique<Batch>();
  batch->rank = rank;
  batch->num_open = num_calls;
  for (std::uint32_t i = 0; i < num_calls; ++i) {
    Call& call = batch->calls.emplace_back();
    call.batch = batch.get();
    if (!recv_all(socket, &call.wire, sizeof(call.wire))) return nullptr;
    call.sent.resize(call.wire.send_bytes);
    call.result.resize(call.wire.recv_bytes);
    if (!recv_all(socket, call.sent.data(), call.sent.size())) return nullptr;
  }
  return batch;
}

void Server::add(std::unique_ptr<Batch> batch) {
  const std::lock_guard lock(mutex_);
  Batch& added = *batch;
  batches_[&added] = std::move(batch);
  for (Call& call : added.calls) {
    switch (call.wire.kind) {
      case Kind::kSend:
        sends_[{added.rank, call.wire.peer}].push_back(&call);
        break;
      case Kind::kRecv:
        recvs_[{call.wire.peer, added.rank}].push_back(&call);
        break;
      default:
        collectives_[static_cast<std::size_t>(added.rank)].push_back(&call);
    }
  }
  while (match_collective()) continue;
  std::vector<Pair> pairs;
  for (const auto& [pair, calls] : sends_) pairs.push_back(pair);
  for (const Pair& pair : pairs) {
    while (match_pair(pair)) continue;
  }
  // The first rank last: its process is the one that serves, and may end with its answer.
  for (auto finished = finished_.rbegin(); finished != finished_.rend(); ++finished)
    answer(*finished->second);
  finished_.clear();
}

bool Server::match_collective() {
  Calls calls;
  for (const Calls& of_rank : collectives_) {
    if (of_rank.empty()) return false;
    calls.push_back(of_rank.front());
  }
  const WireCall& first = calls.front()->wire;
  const bool is_equal = std::all_of(calls.begin(), calls.end(), [&](const Call* call) {
    const WireCall& wire = call->wire;
    return wire.kind == first.kind && wire.dtype == first.dtype &&
           wire.reduction == first.reduction && wire.peer == first.peer &&
           wire.count == first.count;
  });
  if (!is_equal) return false;
  compute(calls);
  for (Calls& of_rank : collectives_) of_rank.pop_front();
  for (Call* const call : calls) finish(*call);
  return true;
}

void Server::compute(const Calls& calls) {
  const WireCall& wire = calls.front()->wire;
  const auto dtype = static_cast<ncclDataType_t>(wire.dtype);
  const auto op = static_cast<ncclRedOp_t>(wire.reduction);
  const std::size_t bytes = wire.count * size_of(dtype);
  const auto root = static_cast<std::size_t>(std::max(wire.peer, 0));
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    std::vector<char>& result = calls[rank]->result;
    if (result.empty()) continue;
    if (wire.kind == Kind::kBroadcast) {
      result = calls[root]->sent;
    } else if (wire.kind == Kind::kAllGather) {
      for (std::size_t from = 0; from < calls.size(); ++from)
        std::memcpy(result.data() + from * bytes, calls[from]->sent.data(), bytes);
    } else {
      const std::size_t offset = wire.kind == Kind::kReduceScatter ? rank * bytes : 0;
      std::vector<const void*> inputs;
      for (const Call* const call : calls) inputs.push_back(call->sent.data() + offset);
      reduce(inputs, result.data(), wire.count, dtype, op);
    }
  }
}

bool Server::match_pair(const Pair& pair) {
  Calls& sends = sends_[pair];
  Calls& recvs = recvs_[pair];
  if (sends.empty() || recvs.empty()) return false;
  Call& send = *sends.front();
  Call& recv = *recvs.front();
  if (send.wire.send_bytes != recv.wire.recv_bytes) return false;
  recv.result = std::move(send.sent);
  sends.pop_front();
  recvs.pop_front();
  finish(send);
  finish(recv);
  return true;
}

void Server::finish(Call& call) {
  Batch& batch = *call.batch;
  if (--batch.num_open == 0) finished_[batch.rank] = &batch;
}

void Server::answer(Batch& batch) {
  // The rank has sent all and reads: this does not wait for it for long.
  const int socket = sockets_[static_cast<std::size_t>(batch.rank)];
  const char is_over = 1;
  bool is_here = socket >= 0 && send_all(socket, &is_over, 1);
  for (const Call& done : batch.calls)
    is_here = is_here && send_all(socket, done.result.data(), done.result.size());
  batches_.erase(&batch);
}

}  // namespace mock_nccl
