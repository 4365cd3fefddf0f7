#include "libddp/kernels/reduce_kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

using Bytes = std::vector<std::byte>;

const Dtype kDtypes[] = {Dtype::Float32, Dtype::Float64, Dtype::BFloat16, Dtype::Float16,
                         Dtype::Int8,    Dtype::UInt8,   Dtype::Int16,    Dtype::Int32,
                         Dtype::Int64,   Dtype::Bool};
const ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg,  ReduceOp::Product, ReduceOp::Min,
                         ReduceOp::Max, ReduceOp::Band, ReduceOp::Bor,     ReduceOp::Bxor};
const std::size_t kCounts[] = {0, 1, 3, 7, 15, 16, 17, 31, 63, 64, 65, 100, 255, 256, 257, 1000};

// ---- A reference that shares no code with the kernels: one element at a time, in double ----

double to_double(Dtype dtype, const std::byte* element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, element_bytes(dtype));
  switch (dtype) {
    case Dtype::Float32:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    case Dtype::Float64:
      return std::bit_cast<double>(bits);
    case Dtype::BFloat16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    default: {
      const int exponent = static_cast<int>(bits >> 10 & 31);
      const double mantissa = static_cast<double>(bits & 1023);
      const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
      if (exponent == 31) return sign * (mantissa == 0 ? INFINITY : NAN);
      if (exponent == 0) return sign * std::ldexp(mantissa, -24);
      return sign * std::ldexp(1024 + mantissa, exponent - 25);
    }
  }
}

// Nearest value with `mantissa_bits` after the leading one, ties to even, exponent at least
// `min_exponent`; then back to the bits of the type.
std::uint16_t round_to_half(double value, bool is_bfloat) {
  const int mantissa_bits = is_bfloat ? 7 : 10;
  const int bias = is_bfloat ? 127 : 15;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  const int max_field = is_bfloat ? 255 : 31;
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | static_cast<std::uint16_t>(max_field << mantissa_bits);
  int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const double scaled = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  // A carry into the next exponent comes out right by itself.
  const auto whole = static_cast<std::uint32_t>(scaled);
  const std::uint32_t field = static_cast<std::uint32_t>(exponent + bias - 1) << mantissa_bits;
  const std::uint32_t bits = std::min<std::uint32_t>(field + whole, max_field << mantissa_bits);
  return sign | static_cast<std::uint16_t>(bits);
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::Product:
      return static_cast<T>(a * b);
    case ReduceOp::Min:
      return b < a ? b : a;
    case ReduceOp::Max:
      return a < b ? b : a;
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
T finish(ReduceOp op, T value, std::size_t num_sources, double scale) {
  if (op == ReduceOp::Avg) value = value / static_cast<T>(num_sources);
  return scale == 1.0 ? value : value * static_cast<T>(scale);
}

std::uint64_t combine_bits(ReduceOp op, Dtype dtype, std::uint64_t a, std::uint64_t b) {
  const bool is_bool = dtype == Dtype::Bool;
  if (op == ReduceOp::Band || (is_bool && (op == ReduceOp::Product || op == ReduceOp::Min))) {
    return a & b;
  }
  if (op == ReduceOp::Bor || (is_bool && (op == ReduceOp::Sum || op == ReduceOp::Max))) {
    return a | b;
  }
  if (op == ReduceOp::Bxor) return a ^ b;
  if (dtype == Dtype::UInt8 || op == ReduceOp::Sum || op == ReduceOp::Product) {
    return combine<std::uint64_t>(op, a, b);
  }
  return static_cast<std::uint64_t>(
      combine(op, static_cast<std::int64_t>(a), static_cast<std::int64_t>(b)));
}

std::uint64_t load_integer(Dtype dtype, const std::byte* element) {
  const std::size_t bytes = element_bytes(dtype);
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, bytes);
  if (dtype == Dtype::UInt8 || dtype == Dtype::Bool) return bits;
  const int unused = 64 - 8 * static_cast<int>(bytes);
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(bits << unused) >> unused);
}

void reduce_element(Dtype dtype, ReduceOp op, double scale, const std::vector<Bytes>& sources,
                    std::size_t at, std::byte* to) {
  const std::size_t bytes = element_bytes(dtype);
  if (!scalable(dtype)) {
    std::uint64_t value = load_integer(dtype, &sources[0][at]);
    for (std::size_t s = 1; s < sources.size(); ++s) {
      value = combine_bits(op, dtype, value, load_integer(dtype, &sources[s][at]));
    }
    std::memcpy(to, &value, bytes);
    return;
  }
  if (dtype == Dtype::Float64) {
    double value = to_double(dtype, &sources[0][at]);
    for (std::size_t s = 1; s < sources.size(); ++s) {
      value = combine(op, value, to_double(dtype, &sources[s][at]));
    }
    value = finish(op, value, sources.size(), scale);
    std::memcpy(to, &value, bytes);
    return;
  }
  float value = static_cast<float>(to_double(dtype, &sources[0][at]));
  for (std::size_t s = 1; s < sources.size(); ++s) {
    value = combine(op, value, static_cast<float>(to_double(dtype, &sources[s][at])));
  }
  value = finish(op, value, sources.size(), scale);
  if (dtype == Dtype::Float32) {
    std::memcpy(to, &value, bytes);
  } else {
    const std::uint16_t half = round_to_half(value, dtype == Dtype::BFloat16);
    std::memcpy(to, &half, bytes);
  }
}

Bytes random_bytes(Dtype dtype, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count * element_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* to = &bytes[i * element_bytes(dtype)];
    const double value = std::uniform_real_distribution<double>(-3.0, 3.0)(random);
    const auto single = static_cast<float>(value);
    if (dtype == Dtype::Float32) {
      std::memcpy(to, &single, 4);
    } else if (dtype == Dtype::Float64) {
      std::memcpy(to, &value, 8);
    } else if (scalable(dtype)) {
      const std::uint16_t half = round_to_half(value, dtype == Dtype::BFloat16);
      std::memcpy(to, &half, 2);
    } else {
      std::uint64_t bits = (std::uint64_t{random()} << 32) | random();
      if (dtype == Dtype::Bool) bits &= 1;
      std::memcpy(to, &bits, element_bytes(dtype));
    }
  }
  return bytes;
}

ReduceJob job_of(Dtype dtype, ReduceOp op, double scale, const std::vector<const std::byte*>& from,
                 std::size_t count) {
  return {.dtype = dtype,
          .op = op,
          .count = count,
          .sources = from.data(),
          .num_sources = static_cast<int>(from.size()),
          .scale = scale};
}

/// Into a cache line's beginning, as a part of a result that goes past the caches.
Bytes run_streaming(ReducePath path, ReduceJob job) {
  const std::size_t bytes = job.count * element_bytes(job.dtype);
  Bytes room(bytes + 64);
  void* aligned = room.data();
  std::size_t space = room.size();
  auto* to = static_cast<std::byte*>(std::align(64, bytes, aligned, space));
  job.destinations = &to;
  job.num_destinations = 1;
  job.whole_count = 64u << 20;
  reduce_on(path, job);
  return Bytes(to, to + bytes);
}

/// Runs one job on `path`: past the caches, into one new buffer, in place into the first source.
std::vector<Bytes> run(ReducePath path, Dtype dtype, ReduceOp op, double scale,
                       std::vector<Bytes> sources, std::size_t count) {
  Bytes out(count * element_bytes(dtype));
  std::vector<const std::byte*> from;
  for (const Bytes& source : sources) from.push_back(source.data());
  ReduceJob job = job_of(dtype, op, scale, from, count);
  const Bytes streamed = run_streaming(path, job);
  std::byte* to[] = {out.data(), sources[0].data()};
  job.destinations = to;
  job.num_destinations = 2;
  reduce_on(path, job);
  return {streamed, out, sources[0]};
}

void check(Dtype dtype, ReduceOp op, std::size_t count, int num_sources, double scale) {
  std::vector<Bytes> sources;
  for (int s = 0; s < num_sources; ++s) {
    sources.push_back(random_bytes(dtype, count, static_cast<unsigned>(100 * s + count)));
  }
  Bytes expected(count * element_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i * element_bytes(dtype);
    reduce_element(dtype, op, scale, sources, at, &expected[at]);
  }
  for (ReducePath path : reduce_paths()) {
    INFO(name(path) << " " << name(dtype) << " " << name(op) << " x" << count << " of "
                    << num_sources << " scale " << scale);
    const std::vector<Bytes> results = run(path, dtype, op, scale, sources, count);
    for (const Bytes& result : results) REQUIRE(result == expected);
  }
}

TEST_CASE("every path gives the bits of the element-wise reference") {
  for (Dtype dtype : kDtypes) {
    for (ReduceOp op : kOps) {
      if (!reducible(dtype, op)) continue;
      for (std::size_t count : kCounts) check(dtype, op, count, 2, 1.0);
      for (int num_sources : {1, 3, 5, 16}) check(dtype, op, 77, num_sources, 1.0);
    }
  }
}

TEST_CASE("scale and average are part of the pass") {
  for (Dtype dtype : {Dtype::Float32, Dtype::Float64, Dtype::BFloat16, Dtype::Float16}) {
    for (int num_sources : {1, 2, 3, 4, 7}) {
      check(dtype, ReduceOp::Sum, 131, num_sources, 0.37);
      check(dtype, ReduceOp::Avg, 131, num_sources, 1.0);
    }
    check(dtype, ReduceOp::Avg, 131, 3, 0.5);
  }
}

TEST_CASE("the best path is the one that reduce takes") {
  Bytes a = random_bytes(Dtype::Float32, 100, 1);
  const Bytes b = random_bytes(Dtype::Float32, 100, 2);
  const std::byte* from[] = {a.data(), b.data()};
  const Bytes expected =
      run(reduce_paths().back(), Dtype::Float32, ReduceOp::Sum, 1.0, {a, b}, 100)[0];
  std::byte* to = a.data();
  reduce({.count = 100,
          .sources = from,
          .num_sources = 2,
          .destinations = &to,
          .num_destinations = 1});
  REQUIRE(a == expected);
}

TEST_CASE("float16 and bfloat16: every finite bit pattern survives, NaN stays NaN") {
  for (Dtype dtype : {Dtype::Float16, Dtype::BFloat16}) {
    Bytes all(65536 * 2);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(&all[i * 2], &bits, 2);
    }
    for (ReducePath path : reduce_paths()) {
      const Bytes out = run(path, dtype, ReduceOp::Sum, 1.0, {all}, 65536)[0];
      for (std::size_t at = 0; at < out.size(); at += 2) {
        const bool is_nan = std::isnan(to_double(dtype, &all[at]));
        INFO(name(path) << " " << name(dtype) << " pattern " << at / 2);
        REQUIRE(is_nan == std::isnan(to_double(dtype, &out[at])));
        if (!is_nan) REQUIRE(std::memcmp(&all[at], &out[at], 2) == 0);
      }
    }
  }
}

TEST_CASE("float16 rounds to nearest even on every path, subnormal and overflowing results too") {
  for (double scale : {0x1p-10, 0x1.8p-13, 3.0, 65504.0}) {
    Bytes all(0x7C00 * 2);
    for (std::uint16_t bits = 0; bits < 0x7C00; ++bits) std::memcpy(&all[bits * 2], &bits, 2);
    for (ReducePath path : reduce_paths()) {
      const Bytes out = run(path, Dtype::Float16, ReduceOp::Sum, scale, {all}, 0x7C00)[0];
      for (std::size_t at = 0; at < out.size(); at += 2) {
        std::uint16_t bits;
        std::memcpy(&bits, &out[at], 2);
        const float exact =
            static_cast<float>(to_double(Dtype::Float16, &all[at])) * static_cast<float>(scale);
        INFO(name(path) << " pattern " << at / 2 << " scale " << scale);
        REQUIRE(bits == round_to_half(exact, false));
      }
    }
  }
}

TEST_CASE("large results that are not read in the pass are streamed") {
  const std::size_t count = (17u << 20) / 4 + 5;
  std::vector<float> a(count), b(count), out(count + 16, -1.0f);
  for (std::size_t i = 0; i < count; ++i) {
    a[i] = static_cast<float>(i % 1000);
    b[i] = static_cast<float>(i % 77);
  }
  const auto misaligned = reinterpret_cast<std::uintptr_t>(out.data()) % 64 / 4;
  float* aligned = out.data() + (misaligned == 0 ? 0 : 16 - misaligned);
  const std::byte* from[] = {reinterpret_cast<std::byte*>(a.data()),
                             reinterpret_cast<std::byte*>(b.data())};
  auto* to = reinterpret_cast<std::byte*>(aligned);
  for (ReducePath path : reduce_paths()) {
    std::fill(out.begin(), out.end(), -1.0f);
    reduce_on(path, {.count = count,
                     .sources = from,
                     .num_sources = 2,
                     .destinations = &to,
                     .num_destinations = 1});
    bool equal = true;
    for (std::size_t i = 0; i < count; ++i) equal = equal && aligned[i] == a[i] + b[i];
    INFO(name(path));
    REQUIRE(equal);
  }
}

TEST_CASE("which operations a type has") {
  REQUIRE(reducible(Dtype::Float32, ReduceOp::Avg));
  REQUIRE_FALSE(reducible(Dtype::Float32, ReduceOp::Band));
  REQUIRE_FALSE(reducible(Dtype::Int64, ReduceOp::Avg));
  REQUIRE(reducible(Dtype::Bool, ReduceOp::Bxor));
  REQUIRE(scalable(Dtype::BFloat16));
  REQUIRE_FALSE(scalable(Dtype::Bool));
}

}  // namespace
}  // namespace libddp
