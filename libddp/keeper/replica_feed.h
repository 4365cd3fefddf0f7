#pragma once

// What a holder answers to a ReplicaRequest, piece by piece, the data straight out of the slot
// (replica_wire.h). The slot is held as long as this lives. Thread rule: one thread.
//
//   ReplicaFeed feed(std::move(held));              // or feed("rank 2 has no memory here")
//   while (!feed.rest().empty()) feed.advance(send_some(socket, feed.rest()));

#include <cstddef>
#include <span>
#include <string>

#include "libddp/keeper/held_save.h"
#include "libddp/keeper/replica_wire.h"

namespace libddp {

class ReplicaFeed {
 public:
  /// REQUIRES a save.
  explicit ReplicaFeed(HeldSave held);
  /// Says why not.
  explicit ReplicaFeed(const std::string& refusal);
  ReplicaFeed(const ReplicaFeed&) = delete;
  ReplicaFeed& operator=(const ReplicaFeed&) = delete;

  /// What comes next; empty at the end.
  std::span<const std::byte> rest() const { return rest_; }
  /// So much of rest() is sent.
  void advance(std::size_t bytes);

 private:
  enum class Part { Opening, ChunkHead, Chunk, End };

  void next();
  void show_text() { rest_ = std::as_bytes(std::span(text_)); }
  void show_chunk_head();

  HeldSave held_;
  Part part_ = Part::Opening;
  std::size_t chunk_ = 0;
  /// All that stands before the chunks, then the head of a chunk.
  std::string text_;
  std::span<const std::byte> rest_;
};

}  // namespace libddp
