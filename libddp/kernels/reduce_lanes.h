#pragma once

// The kernels, written once over GCC's vector types. Included only by reduce_kernels_<isa>.cpp,
// each of which is compiled with its own flags; everything is in an anonymous namespace, so that
// the linker can never replace one file's code by that of another.
//
// Words: *lanes* = how elements of one dtype become a vector and back; *Isa* = vector width and
// conversions of one instruction set (not in templates: g++ 12 rejects __builtin_convertvector on
// dependent types).
//
// `Isa::kStreams` says whether it has stores that go past the caches.
//
//   struct Isa { static constexpr int kVectorBytes = 32; ... };
//   ReduceKernel kernel = find_kernel<Isa>(Dtype::Float32, ReduceOp::Sum);

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "libddp/kernels/reduce_table.h"

namespace libddp {
namespace {

/// Elements that are computed in their own type.
template <class T, class Isa>
struct NativeLanes {
  using Set = Isa;
  using Element = T;
  using Scalar = T;
  static constexpr int kLanes = Isa::kVectorBytes / static_cast<int>(sizeof(T));
  typedef T Vector __attribute__((vector_size(Isa::kVectorBytes)));

  static Vector load(const Element* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  static void store(Element* to, Vector vector) { std::memcpy(to, &vector, sizeof(vector)); }
};

/// bf16 is the upper half of an fp32; rounding is integer arithmetic.
template <class Isa>
struct BFloat16Lanes {
  using Set = Isa;
  using Element = std::uint16_t;
  using Scalar = float;
  static constexpr int kLanes = Isa::kVectorBytes / 4;
  typedef float Vector __attribute__((vector_size(Isa::kVectorBytes)));
  typedef std::uint32_t Bits __attribute__((vector_size(Isa::kVectorBytes)));

  static Vector load(const Element* from) {
    Bits bits;
    Isa::widen_bits(from, &bits);
    return (Vector)(bits << 16);
  }
  static void store(Element* to, Vector vector) {
    const Bits bits = (Bits)vector;
    const Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    // Rounding would turn some NaNs into infinity: all become the one quiet NaN.
    const Bits is_nan = (Bits)(vector != vector);
    Isa::narrow_bits((rounded & ~is_nan) | (is_nan & 0x7FC0), to);
  }
};

template <class Isa>
struct Float16Lanes {
  using Set = Isa;
  using Element = std::uint16_t;
  using Scalar = float;
  static constexpr int kLanes = Isa::kVectorBytes / 4;
  typedef float Vector __attribute__((vector_size(Isa::kVectorBytes)));

  static Vector load(const Element* from) {
    Vector vector;
    Isa::widen(from, &vector);
    return vector;
  }
  static void store(Element* to, Vector vector) { Isa::narrow(vector, to); }
};

/// Stores past the caches. REQUIRES `to` on a multiple of the vector's bytes.
template <class Lanes>
[[gnu::always_inline]] inline void stream_vector(typename Lanes::Element* to,
                                                 typename Lanes::Vector vector) {
  typename Lanes::Element packed[Lanes::kLanes];
  Lanes::store(packed, vector);
  Lanes::Set::template stream_vector<sizeof(packed)>(to, packed);
}

struct Add {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Multiply {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};
struct Smaller {
  template <class V>
  static V apply(V a, V b) {
    return b < a ? b : a;
  }
};
struct Larger {
  template <class V>
  static V apply(V a, V b) {
    return a < b ? b : a;
  }
};
struct And {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

/// What happens to a sum before it is stored. kActive is false where there is nothing to do, so
/// that the common loop carries no test.
template <class Lanes, bool kActive>
struct Finish {
  using Vector = typename Lanes::Vector;
  using Scalar = typename Lanes::Scalar;

  explicit Finish(const KernelJob& job)
      : divides(job.divisor != 1.0),
        divisor(static_cast<Scalar>(job.divisor)),
        factor(static_cast<Scalar>(job.factor)) {}

  Vector apply(Vector vector) const {
    if constexpr (kActive) {
      if (divides) vector = vector / divisor;
      vector = vector * factor;
    }
    return vector;
  }

  bool divides;
  Scalar divisor;
  Scalar factor;
};

template <class Element>
const Element* source_at(const KernelJob& job, int source, std::size_t index) {
  return reinterpret_cast<const Element*>(job.sources[source]) + index;
}

template <class Element>
Element* destination_at(const KernelJob& job, int destination, std::size_t index) {
  return reinterpret_cast<Element*>(job.destinations[destination]) + index;
}

/// kUnroll vectors from `index` on: all sources are read before anything is written, so a
/// destination may be a source.
template <class Lanes, class Op, int kUnroll, bool kStream, class Ending>
[[gnu::always_inline]] inline void reduce_block(const KernelJob& job, const Ending& finish,
                                                std::size_t index) {
  using Element = typename Lanes::Element;
  typename Lanes::Vector sums[kUnroll];
  const Element* first = source_at<Element>(job, 0, index);
  for (int k = 0; k < kUnroll; ++k) sums[k] = Lanes::load(first + k * Lanes::kLanes);
  for (int s = 1; s < job.num_sources; ++s) {
    const Element* next = source_at<Element>(job, s, index);
    for (int k = 0; k < kUnroll; ++k) {
      sums[k] = Op::apply(sums[k], Lanes::load(next + k * Lanes::kLanes));
    }
  }
  for (int k = 0; k < kUnroll; ++k) sums[k] = finish.apply(sums[k]);
  for (int d = 0; d < job.num_destinations; ++d) {
    Element* to = destination_at<Element>(job, d, index);
    for (int k = 0; k < kUnroll; ++k) {
      if constexpr (kStream) {
        stream_vector<Lanes>(to + k * Lanes::kLanes, sums[k]);
      } else {
        Lanes::store(to + k * Lanes::kLanes, sums[k]);
      }
    }
  }
}

/// Fewer elements than a vector: the same arithmetic on vectors padded with zeros.
template <class Lanes, class Op, class Ending>
void reduce_tail(const KernelJob& job, const Ending& finish, std::size_t index) {
  using Element = typename Lanes::Element;
  const std::size_t bytes = (job.count - index) * sizeof(Element);
  Element padded[Lanes::kLanes] = {};
  std::memcpy(padded, source_at<Element>(job, 0, index), bytes);
  typename Lanes::Vector sum = Lanes::load(padded);
  for (int s = 1; s < job.num_sources; ++s) {
    std::memcpy(padded, source_at<Element>(job, s, index), bytes);
    sum = Op::apply(sum, Lanes::load(padded));
  }
  Lanes::store(padded, finish.apply(sum));
  for (int d = 0; d < job.num_destinations; ++d) {
    std::memcpy(destination_at<Element>(job, d, index), padded, bytes);
  }
}

template <class Lanes, class Op, bool kActive, bool kStream>
void reduce_loop(const KernelJob job) {
  constexpr int kUnroll = 4;
  constexpr std::size_t kStep = Lanes::kLanes;
  const Finish<Lanes, kActive> finish(job);
  std::size_t index = 0;
  for (; index + kUnroll * kStep <= job.count; index += kUnroll * kStep) {
    reduce_block<Lanes, Op, kUnroll, kStream>(job, finish, index);
  }
  for (; index + kStep <= job.count; index += kStep) {
    reduce_block<Lanes, Op, 1, kStream>(job, finish, index);
  }
  if (index < job.count) reduce_tail<Lanes, Op>(job, finish, index);
  if constexpr (kStream) Lanes::Set::fence();
}

/// Streams where the job says so and the loop exists: for sums of floating types.
template <class Lanes, class Op, bool kActive>
void choose_loop(const KernelJob& job) {
  if constexpr (Lanes::Set::kStreams && std::is_same_v<Op, Add> &&
                std::is_floating_point_v<typename Lanes::Scalar>) {
    if (job.streams) return reduce_loop<Lanes, Op, kActive, true>(job);
  }
  reduce_loop<Lanes, Op, kActive, false>(job);
}

template <class Lanes, class Op>
void reduce_lanes(const KernelJob& job) {
  if constexpr (std::is_floating_point_v<typename Lanes::Scalar>) {
    if (job.divisor != 1.0 || job.factor != 1.0) return choose_loop<Lanes, Op, true>(job);
  }
  choose_loop<Lanes, Op, false>(job);
}

template <class Lanes>
ReduceKernel float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return reduce_lanes<Lanes, Add>;
    case ReduceOp::Product:
      return reduce_lanes<Lanes, Multiply>;
    case ReduceOp::Min:
      return reduce_lanes<Lanes, Smaller>;
    case ReduceOp::Max:
      return reduce_lanes<Lanes, Larger>;
    default:
      return nullptr;
  }
}

/// Bits of any integer, counted in bytes: T says how many an element has.
template <class T, class Isa, class Op>
void reduce_bits(const KernelJob& job) {
  KernelJob bytes = job;
  bytes.count = job.count * sizeof(T);
  reduce_lanes<NativeLanes<std::uint8_t, Isa>, Op>(bytes);
}

/// Sums and products wrap around, so they run on the unsigned type.
template <class T, class Isa>
ReduceKernel integer_kernel(ReduceOp op) {
  using Unsigned = NativeLanes<std::make_unsigned_t<T>, Isa>;
  switch (op) {
    case ReduceOp::Sum:
      return reduce_lanes<Unsigned, Add>;
    case ReduceOp::Product:
      return reduce_lanes<Unsigned, Multiply>;
    case ReduceOp::Min:
      return reduce_lanes<NativeLanes<T, Isa>, Smaller>;
    case ReduceOp::Max:
      return reduce_lanes<NativeLanes<T, Isa>, Larger>;
    case ReduceOp::Band:
      return reduce_bits<T, Isa, And>;
    case ReduceOp::Bor:
      return reduce_bits<T, Isa, Or>;
    case ReduceOp::Bxor:
      return reduce_bits<T, Isa, Xor>;
    default:
      return nullptr;
  }
}

template <class Isa>
ReduceKernel bool_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::Bor:
      return reduce_bits<std::uint8_t, Isa, Or>;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Band:
      return reduce_bits<std::uint8_t, Isa, And>;
    case ReduceOp::Bxor:
      return reduce_bits<std::uint8_t, Isa, Xor>;
    default:
      return nullptr;
  }
}

/// Four vectors at a time to aligned destinations; the ends are vectors that overlap the middle.
/// The compiler may not recognise the loop and call memcpy, which this replaces.
template <class Isa>
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void copy_vectors(
    std::byte* to, const std::byte* from, std::size_t bytes) {
  using Lanes = NativeLanes<std::uint8_t, Isa>;
  constexpr std::size_t kStep = Lanes::kLanes;
  auto* target = reinterpret_cast<std::uint8_t*>(to);
  const auto* source = reinterpret_cast<const std::uint8_t*>(from);
  const auto last = Lanes::load(source + bytes - kStep);
  Lanes::store(target, Lanes::load(source));
  std::size_t i = kStep - reinterpret_cast<std::uintptr_t>(to) % kStep;
  for (; i + 4 * kStep <= bytes; i += 4 * kStep) {
    const auto a = Lanes::load(source + i);
    const auto b = Lanes::load(source + i + kStep);
    const auto c = Lanes::load(source + i + 2 * kStep);
    const auto d = Lanes::load(source + i + 3 * kStep);
    Lanes::store(target + i, a);
    Lanes::store(target + i + kStep, b);
    Lanes::store(target + i + 2 * kStep, c);
    Lanes::store(target + i + 3 * kStep, d);
  }
  for (; i + kStep <= bytes; i += kStep) Lanes::store(target + i, Lanes::load(source + i));
  Lanes::store(target + bytes - kStep, last);
}

/// Null where the operation makes no sense for the type.
template <class Isa>
ReduceKernel find_kernel(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::Float32:
      return float_kernel<NativeLanes<float, Isa>>(op);
    case Dtype::Float64:
      return float_kernel<NativeLanes<double, Isa>>(op);
    case Dtype::BFloat16:
      return float_kernel<BFloat16Lanes<Isa>>(op);
    case Dtype::Float16:
      return float_kernel<Float16Lanes<Isa>>(op);
    case Dtype::Int8:
      return integer_kernel<std::int8_t, Isa>(op);
    case Dtype::UInt8:
      return integer_kernel<std::uint8_t, Isa>(op);
    case Dtype::Int16:
      return integer_kernel<std::int16_t, Isa>(op);
    case Dtype::Int32:
      return integer_kernel<std::int32_t, Isa>(op);
    case Dtype::Int64:
      return integer_kernel<std::int64_t, Isa>(op);
    case Dtype::Bool:
      return bool_kernel<Isa>(op);
    case Dtype::Float8E4M3:
    case Dtype::Float8E5M2:
      break;
  }
  return nullptr;
}

}  // namespace
}  // namespace libddp
