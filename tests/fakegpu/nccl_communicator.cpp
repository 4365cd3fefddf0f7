#include "tests/fakegpu/nccl_communicator.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/nccl_reduce.h"

namespace mock_nccl {
namespace {

int next_number() {
  static std::atomic<int> number{0};
  return number++;
}

}  // namespace

Communicator::Communicator(int rank, int num_ranks)
    : rank_(rank), num_ranks_(num_ranks), number_(next_number()) {
  fakegpu::AccessLog::get().allocated(&turn_, 1, nullptr);
}

Communicator::~Communicator() { fakegpu::AccessLog::get().forget(&turn_); }

bool Communicator::connect(const std::string& name) {
  const int socket = connect_to(name);
  {
    const std::lock_guard lock(mutex_);
    if (is_ended()) {
      ::close(socket);
      return false;
    }
    socket_ = socket;
    is_in_use_ = true;
  }
  const WireHello hello{rank_, num_ranks_};
  char all_came = 0;
  const bool came = send_all(socket, &hello, sizeof(hello)) && recv_all(socket, &all_came, 1);
  const std::lock_guard lock(mutex_);
  end_use();
  if (!came || is_ended()) return false;
  state_ = State::kConnected;
  return true;
}

bool Communicator::is_usable() const {
  const std::lock_guard lock(mutex_);
  return !is_ended();
}

bool Communicator::is_connected() const {
  const std::lock_guard lock(mutex_);
  return state_ == State::kConnected;
}

void Communicator::issue(fakegpu::DeviceStream& stream, std::vector<OpCall> calls, bool hangs,
                         int delay_ms) {
  const std::lock_guard lock(mutex_);  // turns and the stream's order agree
  const std::uint64_t turn = num_issued_++;
  stream.enqueue([this, turn, calls = std::move(calls), hangs, delay_ms] {
    execute(turn, calls, hangs, delay_ms);
  });
}

void Communicator::execute(std::uint64_t turn, const std::vector<OpCall>& calls, bool hangs,
                           int delay_ms) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_ended() || num_done_ == turn; });
    if (hangs) changed_.wait(lock, [&] { return is_ended(); });
    if (delay_ms > 0)
      changed_.wait_for(lock, std::chrono::milliseconds(delay_ms), [&] { return is_ended(); });
    if (is_ended()) return;
    is_in_use_ = true;
  }
  if (!calls.empty()) exchange(calls);
  const std::lock_guard lock(mutex_);
  end_use();
  ++num_done_;
  changed_.notify_all();
}

void Communicator::exchange(const std::vector<OpCall>& calls) {
  const auto num_calls = static_cast<std::uint32_t>(calls.size());
  bool is_open = send_all(socket_, &num_calls, sizeof(num_calls));
  for (const OpCall& call : calls) {
    std::vector<char> scaled;
    const void* data = call.send;
    if (!call.factor.empty()) {
      const auto dtype = static_cast<ncclDataType_t>(call.wire.dtype);
      scaled.assign(static_cast<const char*>(data),
                    static_cast<const char*>(data) + call.wire.send_bytes);
      scale(scaled.data(), scaled.size() / size_of(dtype), dtype, call.factor.data());
      data = scaled.data();
    }
    is_open = is_open && send_all(socket_, &call.wire, sizeof(call.wire)) &&
              send_all(socket_, data, call.wire.send_bytes);
  }
  char is_over = 0;
  is_open = is_open && recv_all(socket_, &is_over, 1);
  for (const OpCall& call : calls)
    is_open = is_open && recv_all(socket_, call.recv, call.wire.recv_bytes);
  if (is_open) return;
  // The server is gone: NCCL's kernel would spin.
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_ended(); });
}

void Communicator::abort() {
  const std::lock_guard lock(mutex_);
  if (is_ended()) return;
  state_ = State::kAborted;
  shut_down();
}

void Communicator::destroy() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_ended() || num_done_ == num_issued_; });
  if (is_ended()) return;
  state_ = State::kDestroyed;
  shut_down();
}

void Communicator::shut_down() {
  if (socket_ >= 0) ::shutdown(socket_, SHUT_RDWR);
  if (!is_in_use_) end_use();
  changed_.notify_all();
}

void Communicator::end_use() {
  is_in_use_ = false;
  if (is_ended() && socket_ >= 0) ::close(std::exchange(socket_, -1));
}

void Communicator::hang_until_abort() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_ended(); });
}

}  // namespace mock_nccl
