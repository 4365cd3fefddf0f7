// All-reduce of float32: libddp's ShmComm against MPI_Allreduce, alternating in one run.
//
//   mpirun.openmpi -n 2 libddp_bench_mpi_openmpi [largest size in bytes] [seconds per case]
//
// One JSON line per size and memory (arena: the library's own blocks, ordinary: operator new), from
// rank 0. Every round calls one side `repeat` times, then the other, in turning order; a sample is
// the slowest rank's wall time per call. CPU seconds are those of all ranks per call.

#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/mpi_store.h"
#include "tests/support/joined_comm.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Side {
  std::function<void()> call;
  std::vector<double> wall_us;
  double cpu_seconds = 0;
  long num_calls = 0;
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void sample(Side& side, int repeat) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double cpu = cpu_seconds();
  const auto start = Clock::now();
  for (int i = 0; i < repeat; ++i) side.call();
  double wall = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / repeat;
  side.cpu_seconds += cpu_seconds() - cpu;
  side.num_calls += repeat;
  MPI_Allreduce(MPI_IN_PLACE, &wall, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  side.wall_us.push_back(wall);
}

double cpu_us_per_call(const Side& side) {
  double total = side.cpu_seconds;
  MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  return total / static_cast<double>(side.num_calls) * 1e6;
}

std::string load_average() {
  std::ifstream file("/proc/loadavg");
  std::string load;
  file >> load;
  return load.empty() ? "0" : load;
}

/// Calls per sample such that one lasts about a millisecond, equal on all ranks.
int choose_repeat(Side& side) {
  sample(side, 3);
  sample(side, 3);
  const double us = std::max(0.1, side.wall_us.back());
  side = Side{side.call, {}, 0, 0};
  return std::clamp(static_cast<int>(1000.0 / us), 1, 2000);
}

void report(const char* memory, std::size_t bytes, Side& ours, Side& peer, int rank) {
  const double our_cpu = cpu_us_per_call(ours);
  const double peer_cpu = cpu_us_per_call(peer);
  if (rank != 0) return;
  std::sort(ours.wall_us.begin(), ours.wall_us.end());
  std::sort(peer.wall_us.begin(), peer.wall_us.end());
  const double our_min = ours.wall_us.front();
  const double our_median = ours.wall_us[ours.wall_us.size() / 2];
  const double peer_min = peer.wall_us.front();
  const double peer_median = peer.wall_us[peer.wall_us.size() / 2];
  fmt::print(
      "{{\"bench\": \"all_reduce float32 {}\", \"size_bytes\": {}, \"ours_min_us\": {:.3f}, "
      "\"ours_median_us\": {:.3f}, \"peer_min_us\": {:.3f}, \"peer_median_us\": {:.3f}, "
      "\"ratio_min\": {:.2f}, \"ratio_median\": {:.2f}, \"ours_cpu_us\": {:.3f}, "
      "\"peer_cpu_us\": {:.3f}, \"load\": {}}}\n",
      memory, bytes, our_min, our_median, peer_min, peer_median, peer_min / our_min,
      peer_median / our_median, our_cpu, peer_cpu, load_average());
  std::fflush(stdout);
}

class Comparison {
 public:
  Comparison(libddp::test::JoinedComm& joined, int rank, double budget)
      : joined_(joined), rank_(rank), budget_(budget) {}

  void run(std::size_t bytes, bool in_arena) {
    std::shared_ptr<std::byte> block;
    if (in_arena) block = joined_.arena->allocate(bytes);
    if (!in_arena) block.reset(new std::byte[bytes], std::default_delete<std::byte[]>());
    std::unique_ptr<std::byte[]> theirs(new std::byte[bytes]);
    // Zeros stay zeros: repeated sums of anything else would overflow.
    std::memset(block.get(), 0, bytes);
    std::memset(theirs.get(), 0, bytes);
    const int count = static_cast<int>(bytes / sizeof(float));
    Side ours{[&] { all_reduce(block.get(), count); }, {}, 0, 0};
    Side peer{[&] {
                MPI_Allreduce(MPI_IN_PLACE, theirs.get(), count, MPI_FLOAT, MPI_SUM,
                              MPI_COMM_WORLD);
              },
              {},
              0,
              0};
    const int our_repeat = choose_repeat(ours);
    const int peer_repeat = choose_repeat(peer);
    alternate(ours, our_repeat, peer, peer_repeat);
    report(in_arena ? "arena" : "ordinary", bytes, ours, peer, rank_);
  }

 private:
  void all_reduce(std::byte* data, int count) {
    libddp::CommCall call;
    call.description.kind = libddp::OpKind::AllReduce;
    call.description.dtype = libddp::Dtype::Float32;
    call.description.count = static_cast<std::uint64_t>(count);
    call.sequence = ++sequence_;
    call.timeout = std::chrono::seconds(60);
    joined_.comm->all_reduce(call, data);
  }

  void alternate(Side& ours, int our_repeat, Side& peer, int peer_repeat) {
    const auto start = Clock::now();
    for (int round = 0, more = 1; more != 0; ++round) {
      if (round % 2 == 0) sample(ours, our_repeat);
      sample(peer, peer_repeat);
      if (round % 2 != 0) sample(ours, our_repeat);
      const double spent = std::chrono::duration<double>(Clock::now() - start).count();
      more = round < 10 || spent < budget_ ? 1 : 0;
      MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
  }

  libddp::test::JoinedComm& joined_;
  int rank_;
  double budget_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::size_t largest =
      argc > 1 ? static_cast<std::size_t>(std::atoll(argv[1])) : std::size_t{64} << 20;
  const double budget = argc > 2 ? std::atof(argv[2]) : 0.3;
  int rank = 0;
  int world_size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  {
    libddp::bench::MpiStore store;
    libddp::test::JoinedComm joined = libddp::test::join_comm(store, rank, world_size);
    Comparison comparison(joined, rank, budget);
    for (std::size_t bytes = 4; bytes <= largest; bytes *= 4) {
      comparison.run(bytes, true);
      comparison.run(bytes, false);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  MPI_Finalize();
  return 0;
}
