#pragma once

// A text as characters, and batches of it that depend only on seed, step and rank.

#include <cstdint>
#include <string>
#include <vector>

/// Tokens of a batch, row after row: both [rows * context], `targets` one character further on.
struct Batch {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> targets;
};

struct BatchShape {
  std::int64_t rows = 8;
  std::int64_t context = 32;
};

class Text {
 public:
  /// Throws std::runtime_error if the file cannot be read or is too short for one row.
  Text(const std::string& path, BatchShape shape);

  /// Number of different characters; tokens are their places in byte order.
  std::int64_t vocabulary() const { return vocabulary_; }
  BatchShape shape() const { return shape_; }

  /// The same on every machine. No generator runs along, so a resumed run needs no state of it.
  Batch batch(std::uint64_t seed, std::uint64_t step, std::uint64_t rank) const;

 private:
  BatchShape shape_;
  std::int64_t vocabulary_ = 0;
  std::vector<std::int64_t> tokens_;
};
