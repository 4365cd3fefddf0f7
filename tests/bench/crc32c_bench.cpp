// CRC-32C alone, and copies with it beside memcpy: one JSON line per case. memcpy and the copies
// take turns; a ratio is memcpy's time / ours, of the two that followed each other. Each thread
// walks from chunk to chunk through memory of its own that no cache holds, as a snapshot of many
// tensors does.
//
//   libddp_bench_crc32c [threads, default 1] [MiB per thread, default 256] [rounds, default 15]

#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "libddp/kernels/copy_bytes.h"
#include "libddp/kernels/crc32c.h"

namespace {

using Clock = std::chrono::steady_clock;
using Copy = std::uint32_t (*)(libddp::Crc32cPath, void*, const void*, std::size_t);

struct Peer {
  std::string name;
  libddp::Crc32cPath path;
  Copy copy;
  std::vector<double> seconds = {};
};

std::uint32_t plain(libddp::Crc32cPath, void* to, const void* from, std::size_t size) {
  std::memcpy(to, from, size);
  return 0;
}

std::uint32_t ours(libddp::Crc32cPath, void* to, const void* from, std::size_t size) {
  libddp::copy_bytes(to, from, size);
  return 0;
}

template <libddp::Crc32cStores kStores>
std::uint32_t checked(libddp::Crc32cPath path, void* to, const void* from, std::size_t size) {
  return libddp::copy_with_crc32c_on(path, kStores, to, from, size);
}

std::vector<Peer> peers() {
  using libddp::Crc32cStores;
  std::vector<Peer> all = {{"memcpy", {}, plain}, {"copy_bytes", {}, ours}};
  for (libddp::Crc32cPath path : libddp::crc32c_paths()) {
    const std::string name(libddp::name(path));
    all.push_back({name + " chosen", path, checked<Crc32cStores::Chosen>});
    all.push_back({name + " cached", path, checked<Crc32cStores::Cached>});
    all.push_back({name + " streamed", path, checked<Crc32cStores::Streamed>});
  }
  return all;
}

volatile std::uint32_t keep;

// What one thread copies: touched pages, at different offsets into a cache line.
struct Memory {
  explicit Memory(std::size_t bytes) : from(bytes + 16, std::byte{1}), to(bytes, std::byte{2}) {}

  void copy(const Peer& peer, std::size_t chunk_bytes) {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i + chunk_bytes <= to.size(); i += chunk_bytes) {
      sum ^= peer.copy(peer.path, &to[i], &from[i + 16], chunk_bytes);
    }
    keep = sum;
  }

  std::vector<std::byte> from;
  std::vector<std::byte> to;
};

// From when all threads start until the last one is done.
double seconds_of(const Peer& peer, std::vector<Memory>* memories, std::size_t chunk_bytes) {
  std::barrier start(static_cast<std::ptrdiff_t>(memories->size()) + 1);
  std::vector<std::thread> threads;
  for (Memory& memory : *memories) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      memory.copy(peer, chunk_bytes);
    });
  }
  start.arrive_and_wait();
  const auto begin = Clock::now();
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure_copies(std::vector<Memory>* memories, std::size_t chunk_bytes, int rounds) {
  std::vector<Peer> all = peers();
  for (int round = 0; round < rounds; ++round) {
    for (Peer& peer : all) peer.seconds.push_back(seconds_of(peer, memories, chunk_bytes));
  }
  const std::size_t chunks = memories->front().to.size() / chunk_bytes;
  const double bytes = static_cast<double>(chunks * chunk_bytes * memories->size());
  double load = 0;
  ::getloadavg(&load, 1);
  const std::vector<double>& base = all.front().seconds;
  for (const Peer& peer : all) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < base.size(); ++i) ratios.push_back(base[i] / peer.seconds[i]);
    const double best = *std::min_element(peer.seconds.begin(), peer.seconds.end());
    const double best_base = *std::min_element(base.begin(), base.end());
    fmt::print(
        "{{\"bench\": \"copy_with_crc32c\", \"copy\": \"{}\", \"threads\": {}, \"chunk_bytes\": "
        "{}, "
        "\"min_ms\": {:.2f}, \"median_ms\": {:.2f}, \"copied_gb_s\": {:.2f}, "
        "\"memcpy_ratio_of_min\": {:.2f}, \"memcpy_ratio_min\": {:.2f}, "
        "\"memcpy_ratio_median\": {:.2f}, \"load\": {:.2f}}}\n",
        peer.name, memories->size(), chunk_bytes, best * 1e3, median(peer.seconds) * 1e3,
        bytes / best / 1e9, best_base / best, *std::min_element(ratios.begin(), ratios.end()),
        median(ratios), load);
  }
}

void measure_sum(libddp::Crc32cPath path, std::size_t bytes) {
  const std::vector<std::byte> source(bytes, std::byte{1});
  const std::size_t repeats = std::max<std::size_t>(1, (8u << 20) / bytes);
  std::vector<double> samples;
  for (int round = 0; round < 21; ++round) {
    std::uint32_t sum = 0;
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < repeats; ++i) {
      sum = libddp::crc32c_on(path, source.data(), bytes, sum);
    }
    samples.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    keep = sum;
  }
  const double read = static_cast<double>(bytes * repeats);
  const double best = *std::min_element(samples.begin(), samples.end());
  fmt::print(
      "{{\"bench\": \"crc32c\", \"path\": \"{}\", \"size_bytes\": {}, \"min_us\": {:.3f}, "
      "\"median_us\": {:.3f}, \"read_gb_s\": {:.2f}}}\n",
      libddp::name(path), bytes, best * 1e6 / static_cast<double>(repeats),
      median(samples) * 1e6 / static_cast<double>(repeats), read / best / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const std::size_t bytes = static_cast<std::size_t>(argc > 2 ? std::atoi(argv[2]) : 256) << 20;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  for (libddp::Crc32cPath path : libddp::crc32c_paths()) {
    for (std::size_t size : {64u, 1u << 10, 16u << 10, 1u << 20}) measure_sum(path, size);
  }
  std::vector<Memory> memories;
  for (int i = 0; i < threads; ++i) memories.emplace_back(bytes);
  for (std::size_t chunk : {std::size_t{4} << 10, std::size_t{16} << 10, std::size_t{256} << 10,
                            std::size_t{1} << 20, std::size_t{4} << 20, bytes}) {
    measure_copies(&memories, chunk, rounds);
  }
  return 0;
}
