#include "data.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace {

[[noreturn]] void refuse_file(const std::string& path, const std::string& why) {
  throw std::runtime_error("--data '" + path + "': " + why +
                           ". Hint: name a text file that every rank can read.");
}

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (!file) refuse_file(path, std::string("cannot open it: ") + std::strerror(errno));
  std::string text;
  std::array<char, 65536> part;
  while (const std::size_t size = std::fread(part.data(), 1, part.size(), file.get())) {
    text.append(part.data(), size);
  }
  if (std::ferror(file.get())) {
    refuse_file(path, std::string("cannot read it: ") + std::strerror(errno));
  }
  return text;
}

/// Scrambles 64 bits: the mixing step of the SplitMix64 generator.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Text::Text(const std::string& path, BatchShape shape) : shape_(shape) {
  const std::string text = read_file(path);
  if (static_cast<std::int64_t>(text.size()) <= shape.context) {
    refuse_file(path, "it has " + std::to_string(text.size()) + " bytes, and one row takes " +
                          std::to_string(shape.context + 1));
  }
  std::array<std::int64_t, 256> token{};
  for (const unsigned char byte : text) token[byte] = 1;
  for (std::int64_t& place : token) place = place ? vocabulary_++ : 0;
  for (const unsigned char byte : text) tokens_.push_back(token[byte]);
}

Batch Text::batch(std::uint64_t seed, std::uint64_t step, std::uint64_t rank) const {
  const std::uint64_t key = mix(mix(mix(seed) ^ step) ^ rank);
  Batch batch;
  for (std::int64_t row = 0; row < shape_.rows; ++row) {
    const std::uint64_t num_starts = tokens_.size() - shape_.context;
    const auto start = tokens_.begin() + static_cast<std::int64_t>(mix(key ^ row) % num_starts);
    const auto end = start + shape_.context;
    batch.tokens.insert(batch.tokens.end(), start, end);
    batch.targets.insert(batch.targets.end(), start + 1, end + 1);
  }
  return batch;
}
