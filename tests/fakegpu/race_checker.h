#pragma once

// Finds operations on memory of the fake device that nothing orders, whether or not they met in
// time. Each operator and each of mock NCCL's operations notes the bytes that it reads and writes,
// with a vector clock of its stream; two that overlap, one of which writes, and of which neither
// clock knows the other, are a race. So is an operator of the host's on pinned memory that the
// device may still use (host_accesses.cpp); what is launched behind one is ordered with it.
//
// What orders: a stream's own order; an event's wait behind its record; synchronising with a
// stream, an event or a device and a blocking copy to or from the host order everything launched
// later. Host threads of one device (one rank) count as one: an operation that a thread enqueues
// after another has synchronised is behind what that one waited for. What a query that said true
// has seen counts for its own thread alone: a thread that only looks must not hide a missing wait.
// Devices have clocks of their own, joined by a thread that uses several. Operations of one
// communicator give no order between streams.
//
// Memory that goes back to the allocator may be used again by the stream that it was allocated on
// from then on: uses on other streams that are still unordered with that stream at its next
// allocation are races too (record_stream exempts them, as it does in torch).
// Thread rule: any thread.
//
//   fakegpu::reset();
//   { c10::StreamGuard guard(side); x.add_(1); }   // x was filled on the default stream
//   REQUIRE(fakegpu::races().size() == 1);

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fakegpu {

/// An operation as the checker knows it: its place in the order of launches, and its stream.
struct Operation {
  std::string name;
  /// Where `is_of_host`: the other operation's.
  c10::Stream stream;
  std::uint64_t number;
  bool is_of_host = false;
};

struct Race {
  Operation first;
  /// Where `freed`: the allocation that may be given the memory, whose number is 0.
  Operation second;
  bool freed = false;
  /// The allocation, and which of its bytes both use.
  const void* block = nullptr;
  std::size_t block_bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  std::string text() const;
};

/// Those found since the last call or reset.
std::vector<Race> races();
/// Forgets accesses, races and numbers of waits. What happened before counts as ordered.
void reset();

/// Drops the k-th wait (from 1) of a stream for an event after the reset, on the device and in the
/// checker, for tests that each wait is needed. With a device, only its waits are counted.
void ignore_wait(std::int64_t k, int device = -1);
/// Waits since the reset, dropped ones included.
std::int64_t num_waits(int device = -1);
/// From the reset on the checker does not know of the k-th (from 1) of num_host_waits; the host
/// waits all the same.
void ignore_host_wait(std::int64_t k, int device);
/// Operations launched on a device since the reset: operators, copies, and what NCCL does together.
std::int64_t num_operations(int device);
/// How often the host has blocked for a device since the reset: synchronising, a blocking copy, an
/// operator that gives the host a value. Not what operators of this device wait for on their own.
std::int64_t num_host_waits(int device);
/// Numbers of the waits of a device that ordered nothing new: dropping such a one is no race.
std::vector<std::int64_t> redundant_waits(int device);

}  // namespace fakegpu
