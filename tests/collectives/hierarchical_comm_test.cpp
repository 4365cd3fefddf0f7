#include "libddp/collectives/hierarchical_comm.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "tests/support/catch.h"
#include "tests/support/comm_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/hosts_fixture.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::CommFixture;
using libddp::test::expect;
using libddp::test::expect_all;
using libddp::test::HostsRank;
using libddp::test::message_of;
using libddp::test::run_hosts;
using libddp::test::run_transfers;

namespace {

// Hosts of the ranks: 2 x 2, 3 x 1, uneven, mixed up, 2 x 3 with odd slices, 4 x 2.
const std::vector<std::vector<int>> kLayouts{
    {0, 0, 1, 1}, {0, 1, 2},       {0, 0, 1},          {0, 1, 0, 1},
    {0, 1, 1, 1}, {0, 1, 0, 0, 2}, {0, 0, 0, 1, 1, 1}, {0, 0, 1, 1, 2, 2, 3, 3}};

constexpr std::size_t kPeriod = 13;

float value_of(int rank, std::size_t i) {
  return static_cast<float>((static_cast<std::size_t>(rank) * 7 + i) % kPeriod) - 6.0f;
}

// What the ranks' values add up to: they repeat.
class Sums {
 public:
  explicit Sums(int world_size) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      for (int rank = 0; rank < world_size; ++rank) sums_[i] += value_of(rank, i);
    }
  }
  float operator()(std::size_t i) const { return sums_[i % kPeriod]; }

 private:
  float sums_[kPeriod] = {};
};

// `count` floats of a rank, in the arena or not.
struct Floats {
  Floats(HostsRank& me, std::size_t count, bool in_arena) : count(count), ordinary(count) {
    data = ordinary.data();
    if (in_arena) {
      block = me.arena->allocate(count * sizeof(float));
      data = reinterpret_cast<float*>(block.get());
    }
    for (std::size_t i = 0; i < count; ++i) data[i] = value_of(me.rank, i);
  }

  std::size_t count;
  std::vector<float> ordinary;
  std::shared_ptr<std::byte> block;
  float* data;
};

CommCall floats_call(OpKind kind, std::uint64_t sequence, std::size_t count,
                     ReduceOp op = ReduceOp::Sum) {
  return CommFixture::call(kind, sequence, Dtype::Float32, count, op);
}

void check_all_reduce(HostsRank& me, std::uint64_t sequence, std::size_t count, bool in_arena) {
  Floats floats(me, count, in_arena);
  me.comm->all_reduce(floats_call(OpKind::AllReduce, sequence, count), floats.data, 1.0);
  expect_all(floats.data, count, "sum", Sums(me.world_size));
}

void check_gather(HostsRank& me, std::uint64_t sequence, std::size_t count, bool in_arena) {
  const Floats input(me, count, in_arena);
  Floats output(me, count * static_cast<std::size_t>(me.world_size), in_arena);
  me.comm->all_gather(floats_call(OpKind::AllGather, sequence, output.count), input.data,
                      output.data, count * sizeof(float));
  for (int rank = 0; rank < me.world_size; ++rank) {
    const float* block = output.data + static_cast<std::size_t>(rank) * count;
    expect_all(block, count, "block of rank " + std::to_string(rank),
               [&](std::size_t i) { return value_of(rank, i); });
  }
}

void check_scatter(HostsRank& me, std::uint64_t sequence, std::size_t count, bool in_arena) {
  const Floats input(me, count * static_cast<std::size_t>(me.world_size), in_arena);
  Floats output(me, count, in_arena);
  me.comm->reduce_scatter(floats_call(OpKind::ReduceScatter, sequence, input.count), input.data,
                          output.data, count, 0.5);
  const std::size_t own = static_cast<std::size_t>(me.rank) * count;
  const Sums sums(me.world_size);
  expect_all(output.data, count, "half the sum",
             [&](std::size_t i) { return 0.5f * sums(own + i); });
  expect_all(input.data + own, count, "input, which stays",
             [&](std::size_t i) { return value_of(me.rank, own + i); });
}

void check_broadcast(HostsRank& me, std::uint64_t sequence, std::size_t count, int root,
                     bool in_arena) {
  Floats floats(me, count, in_arena);
  CommCall call = floats_call(OpKind::Broadcast, sequence, count);
  call.description.root = root;
  me.comm->broadcast(call, floats.data, count * sizeof(float), root);
  expect_all(floats.data, count, "the root's bytes",
             [&](std::size_t i) { return value_of(root, i); });
}

std::string failure_of(HostsRank& me, const CommCall& call) {
  float data[4] = {};
  try {
    if (call.description.kind == OpKind::Barrier) {
      me.comm->barrier(call);
    } else {
      me.comm->all_reduce(call, data, 1.0);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Whom this rank has waited for most, and which part of all its waits that is.
std::pair<int, double> most_waited_for(HostsRank& me) {
  std::vector<std::int64_t> waits(static_cast<std::size_t>(me.world_size), 0);
  me.comm->add_waits(waits);
  const auto most = std::max_element(waits.begin(), waits.end());
  const auto total = std::accumulate(waits.begin(), waits.end(), std::int64_t{1});
  return {static_cast<int>(most - waits.begin()),
          static_cast<double>(*most) / static_cast<double>(total)};
}

}  // namespace

TEST_CASE("Waits are charged to the rank that is late, on whichever host it is") {
  for (const std::vector<int>& layout : {std::vector{0, 1}, {0, 0, 1, 1}, {0, 1, 1}, {0, 1, 2}}) {
    for (const int late : {0, static_cast<int>(layout.size()) - 1}) {
      run_hosts(layout, [late](HostsRank& me) {
        std::uint64_t sequence = 0;
        for (const std::size_t count : {3u, 30011u, 3u, 30011u}) {
          if (me.rank == late) std::this_thread::sleep_for(100ms);
          // Other hosts need not wait for it here, but will for those that do.
          check_broadcast(me, ++sequence, 3, 0, true);
          check_all_reduce(me, ++sequence, count, true);
          check_all_reduce(me, ++sequence, count, false);
        }
        const auto [rank, part] = most_waited_for(me);
        if (me.rank == late) return;
        expect(rank == late, "rank " + std::to_string(me.rank) + " waited for rank " +
                                 std::to_string(rank) + " most");
        expect(part > 0.6, "not for others too: " + std::to_string(part));
      });
    }
  }
}

TEST_CASE("Collectives over several hosts") {
  for (const std::vector<int>& layout : kLayouts) {
    run_hosts(layout, [](HostsRank& me) {
      expect(me.comm->name() == "hosts" && me.comm->rank() == me.rank, "a communicator of hosts");
      std::uint64_t sequence = 0;
      for (const bool in_arena : {false, true}) {
        // Nothing, less than a line, small, one odd piece, many pieces.
        for (const std::size_t count : {0u, 3u, 1000u, 30011u, 700001u}) {
          check_all_reduce(me, ++sequence, count, in_arena);
          check_gather(me, ++sequence, count / 4, in_arena);
          check_scatter(me, ++sequence, count / 4, in_arena);
          const int root = static_cast<int>(sequence) % me.world_size;
          check_broadcast(me, ++sequence, count, root, in_arena);
          me.comm->barrier(CommFixture::call(OpKind::Barrier, ++sequence));
        }
      }
    });
  }
}

TEST_CASE("A large all-reduce in pieces, of memory of either kind on one host") {
  for (const std::vector<int>& layout : {std::vector<int>{0, 0, 1, 1}, {0, 0, 0, 1, 1, 1}}) {
    run_hosts(layout, [](HostsRank& me) {
      std::uint64_t sequence = 0;
      // Just in pieces, and many of them; the slices of the ranks differ by a line.
      for (const std::size_t count : {262145u, 1500007u}) {
        check_all_reduce(me, ++sequence, count, me.rank % 2 == 0);
        check_all_reduce(me, ++sequence, count, me.rank != 0);
        check_all_reduce(me, ++sequence, 1000, true);
      }
    });
  }
}

// Values of which no two sums round alike in another order.
template <typename Value>
void check_scattered_bits(HostsRank& me, Dtype dtype, std::size_t count) {
  const std::size_t total = count * static_cast<std::size_t>(me.world_size);
  std::vector<Value> sums(total);
  std::minstd_rand random(static_cast<unsigned>(me.rank) + 1);
  std::normal_distribution<float> normal;
  for (Value& value : sums) {
    const auto bits = std::bit_cast<std::uint32_t>(normal(random));
    // bf16 is the upper half.
    if constexpr (sizeof(Value) == 2) value = static_cast<Value>(bits >> 16);
    if constexpr (sizeof(Value) == 4) value = std::bit_cast<Value>(bits);
  }
  // In place, as FSDP does it: the output is the own block.
  std::vector<Value> blocks = sums;
  Value* own = blocks.data() + static_cast<std::size_t>(me.rank) * count;
  for (const OpKind kind : {OpKind::AllReduce, OpKind::ReduceScatter}) {
    const auto sequence = static_cast<std::uint64_t>(count * 4 + (kind == OpKind::AllReduce));
    const CommCall call = CommFixture::call(kind, sequence, dtype, total, ReduceOp::Avg);
    if (kind == OpKind::AllReduce) {
      me.comm->all_reduce(call, sums.data(), 0.25);
    } else {
      me.comm->reduce_scatter(call, blocks.data(), own, count, 0.25);
    }
  }
  const Value* wanted = sums.data() + static_cast<std::size_t>(me.rank) * count;
  expect(std::memcmp(own, wanted, count * sizeof(Value)) == 0, "the bits of an all-reduce");
}

TEST_CASE("Collectives over several sockets per pair of hosts") {
  const auto run = [](HostsRank& me) {
    std::uint64_t sequence = 0;
    // One stripe, some, more than a ring of them and a bit.
    for (const std::size_t count : {5000u, 100003u, 1000001u}) {
      check_all_reduce(me, ++sequence, count, true);
      check_gather(me, ++sequence, count / 4, false);
      check_scatter(me, ++sequence, count / 4, true);
      check_broadcast(me, ++sequence, count, 1, false);
    }
  };
  for (const int num_sockets : {2, 3, 8}) {
    run_hosts({0, 0, 1, 1}, run, {.sockets_per_link = num_sockets});
    run_hosts({0, 1, 2}, run, {.sockets_per_link = num_sockets});
  }
}

TEST_CASE("A reduce-scatter over hosts has the bits of an all-reduce") {
  for (const std::vector<int>& layout : kLayouts) {
    run_hosts(layout, [](HostsRank& me) {
      for (const std::size_t count : {100u, 5000u, 100003u}) {
        check_scattered_bits<float>(me, Dtype::Float32, count);
        check_scattered_bits<std::uint16_t>(me, Dtype::BFloat16, count + 1);
      }
    });
  }
}

// A stage of somebody else, which has no reduce-scatter of its own.
class PlainStage : public InterStage {
 public:
  explicit PlainStage(std::unique_ptr<InterStage> links) : links_(std::move(links)) {}

  bool is_leader() const override { return links_->is_leader(); }
  void begin(const CommCall& call) override { links_->begin(call); }
  void barrier() override { links_->barrier(); }
  void all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                  int num_averaged) override {
    links_->all_reduce(data, count, reduction, num_averaged);
  }
  void all_gather(const std::vector<Region>& regions) override { links_->all_gather(regions); }
  void broadcast(std::byte* data, std::size_t bytes, int root_host) override {
    links_->broadcast(data, bytes, root_host);
  }
  std::optional<std::string> last_call_of(int rank) const override {
    return links_->last_call_of(rank);
  }

 private:
  std::unique_ptr<InterStage> links_;
};

std::unique_ptr<InterStage> make_plain_stage(ShmComm&, InterPlace,
                                             std::unique_ptr<InterStage> links) {
  return std::make_unique<PlainStage>(std::move(links));
}

TEST_CASE("A stage without a reduce-scatter has one all the same") {
  for (const std::vector<int>& layout : kLayouts) {
    const auto run = [](HostsRank& me) {
      check_scatter(me, 1, 30011, true);
      check_scattered_bits<float>(me, Dtype::Float32, 5000);
    };
    run_hosts(layout, run, {}, make_plain_stage);
  }
}

TEST_CASE("Another engine between hosts and a wire dtype do not go together") {
  const auto join = [] {
    run_hosts(
        {0, 1}, [](HostsRank&) {}, {.wire_dtype = Dtype::BFloat16}, make_plain_stage);
  };
  const std::string text = message_of<ArgumentError>(join);
  CHECK(has(text, "wire_dtype=bfloat16 is for libddp's own links"));
  CHECK(has(text, "Hint: pass float32 (or unset LIBDDP_WIRE_DTYPE)"));
}

TEST_CASE("An average over three hosts divides once") {
  run_hosts({0, 1, 2}, [](HostsRank& me) {
    float value = static_cast<float>(me.rank + 1);
    me.comm->all_reduce(floats_call(OpKind::AllReduce, 1, 1, ReduceOp::Avg), &value, 1.0);
    expect(value == 6.0f / 3.0f, "the mean");
  });
}

TEST_CASE("Hosts that call different collectives") {
  for (const std::vector<int>& layout : {std::vector<int>{0, 1}, std::vector<int>{0, 0, 1, 1}}) {
    run_hosts(layout, [&](HostsRank& me) {
      const bool is_odd = me.rank >= me.world_size / 2;
      const CommCall call =
          is_odd ? CommFixture::call(OpKind::Barrier, 1) : floats_call(OpKind::AllReduce, 1, 4);
      const std::string text = failure_of(me, call);
      expect(has(text, "the ranks called different collectives"), text);
      expect(has(text, "all_reduce #1 float32 [4]") && has(text, "barrier #1"), text);
    });
  }
}

TEST_CASE("A host that never comes") {
  run_hosts({0, 1}, [&](HostsRank& me) {
    if (me.rank == 1) return;
    CommCall call = floats_call(OpKind::AllReduce, 1, 4);
    call.timeout = 200ms;
    const std::string text = failure_of(me, call);
    expect(has(text, "all_reduce #1 float32 [4] SUM: timed out after") &&
               has(text, "waiting for rank 1 (pid "),
           text);
  });
}

TEST_CASE("A failure ends a wait for another host") {
  run_hosts({0, 1}, [&](HostsRank& me) {
    if (me.rank == 1) return;
    std::thread other([&] {
      std::this_thread::sleep_for(50ms);
      me.comm->fail({GroupFailure::Kind::Peer, "rank 1 died", 1, 4711});
    });
    const std::string text = failure_of(me, floats_call(OpKind::AllReduce, 1, 4));
    other.join();
    expect(has(text, "rank 1 died"), text);
  });
}

TEST_CASE("Messages between hosts") {
  run_hosts({0, 0, 1, 1}, [](HostsRank& me) {
    // Every rank sends to every other: nothing, small, large; all at once.
    const std::vector<std::size_t> sizes{0, 100, 5000, 3u << 20};
    std::vector<std::vector<std::byte>> memory;
    std::vector<Comm::Transfer> transfers;
    for (int peer = 0; peer < me.world_size; ++peer) {
      if (peer == me.rank) continue;
      for (const bool is_send : {true, false}) {
        for (std::size_t tag = 0; tag < sizes.size(); ++tag) {
          auto& bytes = memory.emplace_back(sizes[tag] + 1);
          if (is_send) std::memset(bytes.data(), me.rank + 1, bytes.size());
          Comm::Transfer transfer;
          transfer.is_send = is_send;
          transfer.peer = peer;
          transfer.tag = static_cast<int>(tag);
          transfer.bytes = sizes[tag];
          transfers.push_back(transfer);
        }
      }
    }
    for (std::size_t i = 0; i < transfers.size(); ++i) transfers[i].data = memory[i].data();
    run_transfers(*me.comm, transfers);
    for (const Comm::Transfer& transfer : transfers) {
      if (transfer.is_send || transfer.bytes == 0) continue;
      const auto* bytes = static_cast<const std::byte*>(transfer.data);
      const auto wanted = static_cast<std::byte>(transfer.peer + 1);
      expect(bytes[0] == wanted && bytes[transfer.bytes - 1] == wanted, "the sender's bytes");
      expect(transfer.source == transfer.peer, "the source");
    }
  });
}

TEST_CASE("A receive from any rank takes what comes from this host and from others") {
  run_hosts({0, 0, 1}, [](HostsRank& me) {
    int value = me.rank;
    if (me.rank != 0) {
      std::vector<Comm::Transfer> send(1);
      send[0].is_send = true;
      send[0].data = &value;
      send[0].bytes = sizeof(value);
      return run_transfers(*me.comm, send);
    }
    int got[2] = {};
    std::vector<Comm::Transfer> receives(2);
    for (int i = 0; i < 2; ++i) {
      receives[i].peer = -1;
      receives[i].data = &got[i];
      receives[i].bytes = sizeof(int);
    }
    run_transfers(*me.comm, receives);
    expect(got[0] + got[1] == 3 && got[0] == receives[0].source && got[1] == receives[1].source,
           "one of each");
  });
}

TEST_CASE("Message sizes that differ between hosts") {
  run_hosts({0, 1}, [](HostsRank& me) {
    std::vector<std::byte> bytes(16);
    std::vector<Comm::Transfer> transfers(1);
    transfers[0].is_send = me.rank == 0;
    transfers[0].peer = 1 - me.rank;
    transfers[0].data = bytes.data();
    transfers[0].bytes = me.rank == 0 ? 16 : 8;
    if (me.rank == 0) {
      me.comm->progress({&transfers[0]});
      return;
    }
    std::string text = "no error";
    try {
      run_transfers(*me.comm, transfers);
    } catch (const PeerError& error) {
      text = error.what();
    }
    expect(has(text, "rank 1 expects 8 bytes with tag 0 from rank 0, which sends 16 bytes"), text);
  });
}
