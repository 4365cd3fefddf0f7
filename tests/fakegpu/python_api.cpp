// What tests/python/support/fakegpu.py calls through ctypes. Text that is given back lasts until
// the thread's next call.

#include <sstream>
#include <string>

#include "tests/fakegpu/fake_device.h"
#include "tests/fakegpu/generator.h"
#include "tests/fakegpu/mock_nccl.h"
#include "tests/fakegpu/race_checker.h"

namespace {

const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace

extern "C" {

const char* fakegpu_races() {
  std::string text;
  for (const fakegpu::Race& race : fakegpu::races()) text += race.text() + "\n";
  return kept(std::move(text));
}

void fakegpu_reset() { fakegpu::reset(); }
void fakegpu_ignore_wait(std::int64_t k, int device) { fakegpu::ignore_wait(k, device); }
void fakegpu_ignore_host_wait(std::int64_t k, int device) { fakegpu::ignore_host_wait(k, device); }
std::int64_t fakegpu_num_waits(int device) { return fakegpu::num_waits(device); }

std::int64_t fakegpu_num_operations(int device) { return fakegpu::num_operations(device); }
std::int64_t fakegpu_num_host_waits(int device) { return fakegpu::num_host_waits(device); }

const char* fakegpu_redundant_waits(int device) {
  std::ostringstream text;
  for (const std::int64_t number : fakegpu::redundant_waits(device)) text << number << ' ';
  return kept(text.str());
}

void fakegpu_set_memory_limit(int device, std::int64_t bytes) {
  fakegpu::set_memory_limit(device, bytes);
}
void fakegpu_set_capturing(int capturing) { fakegpu::set_capturing(capturing != 0); }
void* fakegpu_hold(int device, std::int64_t stream) {
  return new fakegpu::Hold(c10::Stream(c10::Stream::UNSAFE, fakegpu::device_at(device), stream));
}
void fakegpu_release(void* hold) { delete static_cast<fakegpu::Hold*>(hold); }

/// Seed and offset.
void fakegpu_get_generator(int device, std::uint64_t* state) {
  at::Generator generator = fakegpu::Generator::default_of(static_cast<c10::DeviceIndex>(device));
  const std::lock_guard lock(generator.mutex());
  state[0] = generator.current_seed();
  state[1] = generator.get_offset();
}
void fakegpu_set_generator(int device, std::uint64_t seed, std::uint64_t offset) {
  at::Generator generator = fakegpu::Generator::default_of(static_cast<c10::DeviceIndex>(device));
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

void mock_nccl_install() { mock_nccl::install(); }
void mock_nccl_reset() { mock_nccl::reset(); }
void mock_nccl_fail(const char* function, int nth_call, int result, int rank) {
  mock_nccl::fail(function, nth_call, static_cast<ncclResult_t>(result), rank);
}
void mock_nccl_hang(int nth_operation, int rank) { mock_nccl::hang(nth_operation, rank); }
void mock_nccl_hang_init(int rank) { mock_nccl::hang_init(rank); }
void mock_nccl_fail_async(int nth_operation, int result, int rank) {
  mock_nccl::fail_async(nth_operation, static_cast<ncclResult_t>(result), rank);
}
void mock_nccl_delay(int milliseconds) { mock_nccl::delay(milliseconds); }
void mock_nccl_set_version(int version) { mock_nccl::set_version(version); }
int mock_nccl_calls(const char* function, int rank) { return mock_nccl::calls(function, rank); }

/// A line per call: function, rank, communicator, operation, stream, count, peer.
const char* mock_nccl_issued() {
  std::ostringstream text;
  for (const mock_nccl::Issued& call : mock_nccl::issued()) {
    text << call.function << ' ' << call.rank << ' ' << call.communicator << ' ' << call.operation
         << ' ' << call.stream.id() << ' ' << call.count << ' ' << call.peer << '\n';
  }
  return kept(text.str());
}

/// Communicators, memory, registrations, reductions.
const char* mock_nccl_live() {
  const mock_nccl::Live live = mock_nccl::live();
  std::ostringstream text;
  text << live.communicators << ' ' << live.memory << ' ' << live.registrations << ' '
       << live.reductions;
  return kept(text.str());
}

}  // extern "C"
