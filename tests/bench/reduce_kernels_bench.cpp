// The reduce kernels of every instruction set on one core: one JSON line per dtype, path and size.
//
//   libddp_bench_reduce_kernels [seconds per case, default 0.05]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "libddp/kernels/reduce_kernels.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(libddp::ReducePath path, const libddp::ReduceJob& job) {
  const auto start = Clock::now();
  libddp::reduce_on(path, job);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Two sources, both of which take the result: the slice-owner pass of an all-reduce.
void measure(libddp::ReducePath path, libddp::Dtype dtype, std::size_t bytes, double budget) {
  std::vector<std::byte> a(bytes), b(bytes);
  const std::byte* sources[] = {a.data(), b.data()};
  std::byte* destinations[] = {a.data(), b.data()};
  const libddp::ReduceJob job{.dtype = dtype,
                              .count = bytes / libddp::element_bytes(dtype),
                              .sources = sources,
                              .num_sources = 2,
                              .destinations = destinations,
                              .num_destinations = 2};
  std::vector<double> samples;
  for (double spent = 0; spent < budget || samples.size() < 3; spent += samples.back()) {
    samples.push_back(seconds_of(path, job));
  }
  std::sort(samples.begin(), samples.end());
  fmt::print(
      "{{\"bench\": \"reduce_kernels\", \"dtype\": \"{}\", \"path\": \"{}\", \"size_bytes\": {}, "
      "\"min_us\": {:.3f}, \"median_us\": {:.3f}, \"read_gb_s\": {:.2f}}}\n",
      libddp::name(dtype), libddp::name(path), bytes, samples.front() * 1e6,
      samples[samples.size() / 2] * 1e6, 2.0 * static_cast<double>(bytes) / samples.front() / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  const double budget = argc > 1 ? std::atof(argv[1]) : 0.05;
  for (libddp::Dtype dtype : {libddp::Dtype::Float32, libddp::Dtype::BFloat16,
                              libddp::Dtype::Float16, libddp::Dtype::Float64}) {
    for (libddp::ReducePath path : libddp::reduce_paths()) {
      for (std::size_t bytes : {4u << 10, 256u << 10, 16u << 20}) {
        measure(path, dtype, bytes, budget);
      }
    }
  }
  return 0;
}
