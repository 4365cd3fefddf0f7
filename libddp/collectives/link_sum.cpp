#include "libddp/collectives/link_sum.h"

#include <algorithm>

#include "libddp/kernels/reduce_kernels.h"

namespace libddp {
namespace {

/// A multiple of every element's size.
constexpr std::size_t kPieceBytes = kBFloat16PieceCount * sizeof(float);
/// How much a peer may be ahead.
constexpr std::size_t kRingBytes = 4 * kPieceBytes;

std::byte* ring_of(std::vector<std::byte>& memory) {
  memory.resize(kRingBytes);
  return memory.data();
}

}  // namespace

void reduce_hosts(const Reduction& reduction, int num_averaged,
                  const std::vector<const std::byte*>& sources, std::byte* to, std::size_t count) {
  reduce({.dtype = reduction.dtype,
          .op = reduction.op,
          .count = count,
          .sources = sources.data(),
          .num_sources = static_cast<int>(sources.size()),
          .destinations = &to,
          .num_destinations = 1,
          .scale = reduction.scale,
          .num_averaged = num_averaged});
}

LinkSum::LinkSum(LinkPump& pump, const std::vector<LinkPeer>& peers,
                 std::vector<LinkBuffers>& buffers, int host, const Job& job)
    : job_(job),
      host_(host),
      peers_(peers),
      buffers_(buffers),
      element_(element_bytes(job.reduction.dtype)),
      own_(job.segments[static_cast<std::size_t>(host)]),
      sources_(peers.size() + 1, own_.data),
      own_ready_(own_.bytes) {
  const std::size_t bytes = on_wire(own_.bytes);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    inputs_.push_back(&pump.add(peers_[i].give, {.peer = static_cast<int>(i),
                                                 .data = ring_of(buffers_[i].inputs),
                                                 .bytes = bytes,
                                                 .open = std::min(bytes, kRingBytes),
                                                 .ring = kRingBytes}));
    const auto& theirs = job_.segments[static_cast<std::size_t>(peers_[i].host)];
    add_give(pump, i, theirs);
    if (job_.spreads) add_results(pump, i, theirs);
  }
}

void LinkSum::add_give(LinkPump& pump, std::size_t peer, const InterStage::Region& theirs) {
  LinkFlow flow{.is_send = true, .peer = static_cast<int>(peer), .bytes = on_wire(theirs.bytes)};
  flow.data = job_.narrows ? ring_of(buffers_[peer].gives) : theirs.data;
  flow.open = job_.narrows ? 0 : flow.bytes;
  flow.ring = job_.narrows ? kRingBytes : 0;
  LinkFlow& added = pump.add(peers_[peer].give, std::move(flow));
  gives_.push_back(&added);
  if (!job_.narrows) return;
  narrow_gives_.emplace_back(added, theirs.data);
  narrow_give_counts_.push_back(theirs.bytes / element_);
}

// NOTE [Results may overwrite]
// The result of a piece comes only after its owner has had this rank's piece, so the bytes that it
// overwrites have left.
void LinkSum::add_results(LinkPump& pump, std::size_t peer, const InterStage::Region& theirs) {
  LinkFlow out{.is_send = true, .peer = static_cast<int>(peer), .bytes = on_wire(own_.bytes)};
  LinkFlow in{.peer = static_cast<int>(peer), .bytes = on_wire(theirs.bytes)};
  if (!job_.narrows) {
    out.data = job_.output;
    in.data = theirs.data;
    in.open = in.bytes;
    results_.push_back(&pump.add(peers_[peer].result, std::move(out)));
    pump.add(peers_[peer].result, std::move(in));
    return;
  }
  out.data = ring_of(buffers_[peer].results_out);
  in.data = ring_of(buffers_[peer].results_in);
  in.open = std::min(in.bytes, kRingBytes);
  out.ring = in.ring = kRingBytes;
  narrow_results_.emplace_back(pump.add(peers_[peer].result, std::move(out)), job_.output);
  wide_results_.emplace_back(pump.add(peers_[peer].result, std::move(in)), theirs.data);
}

void LinkSum::hold(std::size_t ready) {
  const auto num_hosts = static_cast<int>(job_.segments.size());
  for (int step = 1; step <= num_hosts; ++step) {
    const int host = (host_ + step) % num_hosts;
    const std::size_t bytes = std::min(ready, job_.segments[static_cast<std::size_t>(host)].bytes);
    ready -= bytes;
    if (host == host_) {
      own_ready_ = bytes;
    } else {
      hold_give(static_cast<std::size_t>(host < host_ ? host : host - 1), bytes);
    }
  }
}

void LinkSum::hold_give(std::size_t peer, std::size_t bytes) {
  if (!job_.narrows) {
    gives_[peer]->open = bytes;
    return;
  }
  const std::size_t count = bytes / element_;
  const bool is_all = gives_[peer]->bytes == on_wire(bytes);
  narrow_give_counts_[peer] = is_all ? count : count / kBFloat16PieceCount * kBFloat16PieceCount;
}

bool LinkSum::compute() {
  bool did = false;
  while (reduce_piece()) did = true;
  for (std::size_t i = 0; i < narrow_gives_.size(); ++i) {
    while (narrow_gives_[i].feed(narrow_give_counts_[i])) did = true;
  }
  for (BFloat16Send& result : narrow_results_) {
    while (result.feed(reduced_ / element_)) did = true;
  }
  for (BFloat16Receive& result : wide_results_) {
    while (result.drain()) did = true;
  }
  return did;
}

bool LinkSum::reduce_piece() {
  const std::size_t bytes = std::min(kPieceBytes, own_.bytes - reduced_);
  const bool is_there = std::all_of(inputs_.begin(), inputs_.end(), [&](const LinkFlow* input) {
    return input->done >= on_wire(reduced_ + bytes);
  });
  if (bytes == 0 || !is_there || own_ready_ < reduced_ + bytes) return false;
  const std::size_t count = bytes / element_;
  std::fill(sources_.begin(), sources_.end(), own_.data + reduced_);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    sources_[static_cast<std::size_t>(peers_[i].host)] = input_piece(i, count);
  }
  std::byte* to = job_.output + reduced_;
  reduce_hosts(job_.reduction, job_.num_averaged, sources_, to, count);
  if (job_.narrows && job_.spreads) round_result(to, count);
  reduced_ += bytes;
  for (LinkFlow* input : inputs_) {
    input->open = std::min(input->bytes, on_wire(reduced_) + kRingBytes);
  }
  for (LinkFlow* result : results_) result->open = reduced_;
  return true;
}

const std::byte* LinkSum::input_piece(std::size_t peer, std::size_t count) {
  const std::byte* piece = buffers_[peer].inputs.data() + on_wire(reduced_) % kRingBytes;
  if (!job_.narrows) return piece;
  std::vector<std::byte>& wide = buffers_[peer].wide;
  wide.resize(kPieceBytes);
  widen_bfloat16(wide.data(), piece, count);
  return wide.data();
}

void LinkSum::round_result(std::byte* floats, std::size_t count) {
  std::byte* rounded = buffers_.front().wide.data();  // its floats have been added
  narrow_to_bfloat16(rounded, floats, count);
  widen_bfloat16(floats, rounded, count);
}

}  // namespace libddp
