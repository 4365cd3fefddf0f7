#include "libddp/kernels/crc32c.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

namespace libddp {
namespace {

using Octets = std::vector<std::uint8_t>;

constexpr Crc32cStores kStores[] = {Crc32cStores::Chosen, Crc32cStores::Cached,
                                    Crc32cStores::Streamed};
constexpr std::uint8_t kGuard = 0xA5;
constexpr std::size_t kGuardBytes = 128;

// A reference that shares no code with the kernels: one bit at a time.
std::uint32_t bitwise(const std::uint8_t* bytes, std::size_t size, std::uint32_t before = 0) {
  std::uint32_t state = ~before;
  for (std::size_t i = 0; i < size; ++i) {
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit)
      state = (state & 1u) != 0 ? state >> 1 ^ 0x82F63B78u : state >> 1;
  }
  return ~state;
}

Octets random_octets(std::size_t size, std::uint64_t seed) {
  Octets octets(size + sizeof(std::uint64_t));
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(&octets[i], &word, sizeof(word));
  }
  octets.resize(size);
  return octets;
}

// Bytes from any offset into a cache line, between guards.
class Guarded {
 public:
  explicit Guarded(std::size_t max_size) : octets_(max_size + 2 * kGuardBytes + 64, kGuard) {}

  std::uint8_t* place(std::size_t offset, std::size_t size) {
    const auto address = reinterpret_cast<std::uintptr_t>(octets_.data()) + kGuardBytes;
    start_ = kGuardBytes + (64 - address % 64) % 64 + offset;
    size_ = size;
    return octets_.data() + start_;
  }

  // Whether nothing near the bytes was written; makes them guards again.
  bool renew() {
    const auto is_guard = [](std::uint8_t octet) { return octet == kGuard; };
    const auto begin = octets_.begin() + static_cast<std::ptrdiff_t>(start_);
    const auto end = begin + static_cast<std::ptrdiff_t>(size_);
    const auto tail = static_cast<std::ptrdiff_t>(
        std::min<std::size_t>(kGuardBytes, static_cast<std::size_t>(octets_.end() - end)));
    const bool whole =
        std::all_of(begin - static_cast<std::ptrdiff_t>(kGuardBytes) / 2, begin, is_guard) &&
        std::all_of(end, end + tail, is_guard);
    std::fill(begin, end, kGuard);
    return whole;
  }

 private:
  Octets octets_;
  std::size_t start_ = 0;
  std::size_t size_ = 0;
};

// One copy on one path; a failure names the case.
void require_copy(Crc32cPath path, Crc32cStores stores, Guarded* copies, std::size_t offset,
                  const std::uint8_t* from, std::size_t size, std::uint32_t expected) {
  std::uint8_t* to = copies->place(offset, size);
  const std::uint32_t sum = copy_with_crc32c_on(path, stores, to, from, size);
  const bool same = std::equal(from, from + size, to);
  const bool whole = copies->renew();
  if (sum == expected && same && whole) return;
  CAPTURE(name(path), static_cast<int>(stores), offset, size, sum, expected, same, whole);
  FAIL("a copy or its checksum is wrong");
}

// The same memory at two addresses, as two processes have it: what changes one side is no race that
// the language or a sanitizer knows of.
class TwiceMapped {
 public:
  explicit TwiceMapped(std::size_t size) : size_(size), file_(::memfd_create("crc32c_test", 0)) {
    REQUIRE(file_ >= 0);
    REQUIRE(::ftruncate(file_, static_cast<off_t>(size)) == 0);
    for (void*& side : sides_) {
      side = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
      REQUIRE(side != MAP_FAILED);
    }
  }
  ~TwiceMapped() {
    for (void* side : sides_) ::munmap(side, size_);
    ::close(file_);
  }
  TwiceMapped(const TwiceMapped&) = delete;
  TwiceMapped& operator=(const TwiceMapped&) = delete;

  const void* first() const { return sides_[0]; }
  void* second() const { return sides_[1]; }

 private:
  std::size_t size_;
  int file_;
  std::array<void*, 2> sides_{};
};

std::uint32_t sum_of(const std::string& text) { return crc32c(text.data(), text.size()); }

}  // namespace

TEST_CASE("crc32c of known bytes") {
  // RFC 3720, B.4, and the check value of the catalogue of CRCs.
  Octets ascending(32), descending(32);
  std::iota(ascending.begin(), ascending.end(), std::uint8_t{0});
  std::iota(descending.rbegin(), descending.rend(), std::uint8_t{0});
  const Octets read_command = {0x01, 0xC0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,    0, 0, 0, 0,
                               0x14, 0,    0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
                               0x28, 0,    0, 0, 0, 0, 0, 0, 2, 0, 0, 0,    0, 0, 0, 0};
  for (Crc32cPath path : crc32c_paths()) {
    CAPTURE(name(path));
    CHECK(crc32c_on(path, Octets(32, 0x00).data(), 32) == 0x8A9136AAu);
    CHECK(crc32c_on(path, Octets(32, 0xFF).data(), 32) == 0x62A8AB43u);
    CHECK(crc32c_on(path, ascending.data(), 32) == 0x46DD794Eu);
    CHECK(crc32c_on(path, descending.data(), 32) == 0x113FDB5Cu);
    CHECK(crc32c_on(path, read_command.data(), 48) == 0xD9963A56u);
    CHECK(crc32c_on(path, "123456789", 9) == 0xE3069283u);
  }
  CHECK(sum_of("123456789") == 0xE3069283u);
  CHECK(sum_of("a") == 0xC1D04330u);
}

TEST_CASE("crc32c of no bytes is what came before and touches no memory") {
  CHECK(crc32c(nullptr, 0) == 0u);
  CHECK(crc32c(nullptr, 0, 123u) == 123u);
  CHECK(copy_with_crc32c(nullptr, nullptr, 0, 123u) == 123u);
  for (Crc32cPath path : crc32c_paths()) {
    CHECK(crc32c_on(path, nullptr, 0, 7u) == 7u);
    for (Crc32cStores stores : kStores) {
      CHECK(copy_with_crc32c_on(path, stores, nullptr, nullptr, 0, 7u) == 7u);
    }
  }
}

TEST_CASE("crc32c and its copy: small sizes at every alignment of both sides") {
  constexpr std::size_t kMaxSize = 600;
  const Octets source = random_octets(kMaxSize + 128, 1);
  Guarded copies(kMaxSize);
  for (std::size_t size = 0; size <= kMaxSize; ++size) {
    for (std::size_t offset = 0; offset < 64; ++offset) {
      const std::uint8_t* from = source.data() + offset;
      const std::uint32_t expected = bitwise(from, size);
      for (Crc32cPath path : crc32c_paths()) {
        if (crc32c_on(path, from, size) != expected) {
          CAPTURE(name(path), size, offset);
          FAIL("a checksum is wrong");
        }
        // Every pair of alignments turns up: over 64 sizes the target's passes each of its own.
        const std::size_t to_offset = (size + 5 * offset) % 64;
        for (Crc32cStores stores : kStores) {
          require_copy(path, stores, &copies, to_offset, from, size, expected);
        }
      }
    }
  }
}

TEST_CASE("crc32c and its copy: every pair of alignments") {
  // Sizes around what the kernels take at once, with a rest of every kind.
  constexpr std::size_t kSizes[] = {255, 256, 384, 511, 767, 1024 + 63, 384 + 384 + 77, 13337};
  const Octets source = random_octets(kSizes[7] + 64, 2);
  Guarded copies(kSizes[7]);
  for (std::size_t size : kSizes) {
    for (std::size_t from_offset = 0; from_offset < 64; ++from_offset) {
      const std::uint8_t* from = source.data() + from_offset;
      const std::uint32_t expected = bitwise(from, size);
      for (std::size_t to_offset = 0; to_offset < 64; ++to_offset) {
        for (Crc32cPath path : crc32c_paths()) {
          for (Crc32cStores stores : {Crc32cStores::Cached, Crc32cStores::Streamed}) {
            require_copy(path, stores, &copies, to_offset, from, size, expected);
          }
        }
      }
    }
  }
}

TEST_CASE("crc32c and its copy: large sizes") {
  constexpr std::size_t kMaxSize = 5u << 20;
  const Octets source = random_octets(kMaxSize + 64, 3);
  Guarded copies(kMaxSize);
  std::mt19937_64 random(4);
  for (int round = 0; round < 12; ++round) {
    const std::size_t size =
        round < 9 ? random() % (kMaxSize >> (round % 3) * 4) : kMaxSize - round;
    const std::uint8_t* from = source.data() + random() % 64;
    const std::size_t to_offset = random() % 64;
    const std::uint32_t expected = bitwise(from, size);
    for (Crc32cPath path : crc32c_paths()) {
      CAPTURE(name(path), size);
      REQUIRE(crc32c_on(path, from, size) == expected);
      for (Crc32cStores stores : kStores) {
        require_copy(path, stores, &copies, to_offset, from, size, expected);
      }
    }
  }
}

TEST_CASE("crc32c of parts, one after the other and combined") {
  constexpr std::size_t kSize = 20'000;
  const Octets whole = random_octets(kSize, 5);
  const std::uint32_t expected = bitwise(whole.data(), kSize);
  std::mt19937_64 random(6);
  for (int round = 0; round < 200; ++round) {
    const std::size_t cut = round == 0 ? 0 : round == 1 ? kSize : random() % kSize;
    const std::uint8_t* second = whole.data() + cut;
    CAPTURE(cut);
    CHECK(crc32c(second, kSize - cut, crc32c(whole.data(), cut)) == expected);
    CHECK(crc32c_combine(crc32c(whole.data(), cut), crc32c(second, kSize - cut), kSize - cut) ==
          expected);
    for (Crc32cPath path : crc32c_paths()) {
      for (Crc32cStores stores : kStores) {
        Octets copy(kSize);
        std::uint32_t sum = copy_with_crc32c_on(path, stores, copy.data(), whole.data(), cut);
        sum = copy_with_crc32c_on(path, stores, copy.data() + cut, second, kSize - cut, sum);
        CHECK(sum == expected);
        CHECK(copy == whole);
      }
    }
  }
}

TEST_CASE("the checksum is that of the copy while the source changes") {
  constexpr std::size_t kSize = 256u << 10;
  TwiceMapped memory(kSize);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (std::uint8_t value = 0; !stop; ++value) std::memset(memory.second(), value, kSize);
  });
  Octets copy(kSize);
  int num_wrong = 0;
  for (int round = 0; round < 100; ++round) {
    for (Crc32cPath path : crc32c_paths()) {
      for (Crc32cStores stores : kStores) {
        const std::uint32_t sum =
            copy_with_crc32c_on(path, stores, copy.data(), memory.first(), kSize);
        if (sum != crc32c(copy.data(), kSize)) ++num_wrong;
      }
    }
  }
  stop = true;
  writer.join();
  CHECK(num_wrong == 0);
}

TEST_CASE("crc32c_combine counts more bytes than 32 bits can") {
  // Zeros: the checksum of n + m of them from those of n and m, doubled up to 2^40.
  const Octets zero(1);
  std::uint32_t sum = crc32c(zero.data(), 1);
  std::uint32_t in_steps = sum;
  for (int power = 0; power < 40; ++power) {
    sum = crc32c_combine(sum, sum, std::size_t{1} << power);
    if (power < 20) {
      in_steps = crc32c(Octets(std::size_t{1} << power).data(), std::size_t{1} << power, in_steps);
      CHECK(sum == in_steps);
    }
  }
  // Two ways to 2^40 + 2^33: in one piece, and as 2^33 before and after.
  std::uint32_t part = crc32c(zero.data(), 1);
  for (int power = 0; power < 33; ++power)
    part = crc32c_combine(part, part, std::size_t{1} << power);
  CHECK(crc32c_combine(part, sum, std::size_t{1} << 40) ==
        crc32c_combine(sum, part, std::size_t{1} << 33));
}

}  // namespace libddp
