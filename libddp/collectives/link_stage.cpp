#include "libddp/collectives/link_stage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/monotonic_clock.h"
#include "libddp/collectives/link_sum.h"

namespace libddp {
namespace {

/// Ranks of one host find out first who is missing there, and tell the others.
constexpr std::chrono::milliseconds kHostFirst{500};
/// A lost connection mostly means that a process ended; the control connections say which.
constexpr std::chrono::seconds kCausePatience{1};

}  // namespace

LinkStage::LinkStage(ShmComm& local, int host, std::vector<LinkPeer> peers, bool narrows_floats)
    : local_(local),
      host_(host),
      peers_(std::move(peers)),
      incoming_(peers_.size()),
      buffers_(peers_.size()),
      narrows_floats_(narrows_floats) {
  for (const LinkPeer& peer : peers_) {
    for (const std::vector<UniqueFd>* sockets : {&peer.give, &peer.result}) {
      for (const UniqueFd& socket : *sockets) {
        health_.watch(socket.get(), name_of(peer), peer.rank, peer.pid);
      }
    }
  }
}

void LinkStage::begin(const CommCall& call) {
  call_ = &call;
  start_ = Deadline::Clock::now();
  deadline_ = call.timeout ? Deadline::after(*call.timeout + kHostFirst) : call.deadline;
  local_.show_delay({});
}

void LinkStage::barrier() { exchange({}, std::vector<std::size_t>(peers_.size(), 0)); }

void LinkStage::exchange(const Region& out, const std::vector<std::size_t>& in_bytes) {
  LinkHeader header = LinkHeader::of(*call_, out.bytes);
  header.late_rank = local_.waits().longest().rank;
  header.late_ns = local_.waits().longest().ns;
  outgoing_.resize(sizeof(LinkHeader) + out.bytes);
  std::memcpy(outgoing_.data(), &header, sizeof(LinkHeader));
  if (out.bytes > 0) std::memcpy(outgoing_.data() + sizeof(LinkHeader), out.data, out.bytes);

  LinkPump pump(*this);
  std::vector<const LinkFlow*> receives;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int socket = peers_[i].give.front().get();
    const int peer = static_cast<int>(i);
    const std::size_t expected = sizeof(LinkHeader) + in_bytes[i];
    incoming_[i].bytes.resize(expected);
    incoming_[i].is_checked = false;
    pump.add(socket, {true, peer, outgoing_.data(), outgoing_.size(), outgoing_.size()});
    receives.push_back(
        &pump.add(socket, {false, peer, incoming_[i].bytes.data(), expected, expected}));
  }
  last_peer_ = -1;
  exchange_begin_ns_ = monotonic_ns();
  bool has_waited = false;
  while (true) {
    const bool moved = pump.move();
    check_headers(receives, has_waited);
    if (pump.is_done()) return count_wait();
    if (moved) continue;
    has_waited = true;
    pump.wait();
  }
}

void LinkStage::check_headers(const std::vector<const LinkFlow*>& receives, bool has_waited) {
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (incoming_[i].is_checked || receives[i]->done < sizeof(LinkHeader)) continue;
    check_header(i);
    if (!has_waited) continue;
    last_peer_ = static_cast<int>(i);
    waited_ns_ = monotonic_ns() - exchange_begin_ns_;
  }
}

void LinkStage::count_wait() {
  WaitLedger& waits = local_.waits();
  waits.forget();
  if (last_peer_ < 0) return;
  const auto peer = static_cast<std::size_t>(last_peer_);
  waits.add(peers_[peer].rank, waited_ns_, incoming_[peer].late);
  local_.show_delay(waits.longest());
  waits.forget();  // the leaders of all hosts are level again
}

void LinkStage::check_header(std::size_t peer) {
  Incoming& incoming = incoming_[peer];
  incoming.is_checked = true;
  const std::optional<LinkHeader> theirs = LinkHeader::read(incoming.bytes.data());
  if (!theirs) report_garbage(peer, "bytes that begin no collective");
  incoming.late = {static_cast<int>(theirs->late_rank), theirs->late_ns};
  {
    const std::lock_guard lock(last_calls_mutex_);
    last_calls_[peers_[peer].rank] = theirs->call_text();
  }
  if (theirs->fingerprint != call_->description.fingerprint(call_->sequence)) {
    report_mismatch(peer, *theirs);
  }
  const std::size_t expected = incoming.bytes.size() - sizeof(LinkHeader);
  if (theirs->num_bytes != expected) {
    report_garbage(peer, fmt::format("{} bytes for {}, where {} are due", theirs->num_bytes,
                                     theirs->call_text(), expected));
  }
}

void LinkStage::report_garbage(std::size_t peer, const std::string& what) {
  local_.fail({GroupFailure::Kind::Peer,
               fmt::format("{} sent {}. Hint: all ranks must run one build of libddp with the same "
                           "settings",
                           name_of(peers_[peer]), what),
               peers_[peer].rank, peers_[peer].pid});
  local_.throw_if_failed(call_);
  throw StateError("libddp: a failure was not kept");
}

void LinkStage::report_mismatch(std::size_t peer, const LinkHeader& theirs) {
  const LinkPeer& other = peers_[peer];
  local_.fail(
      {GroupFailure::Kind::Peer,
       fmt::format(
           "the ranks called different collectives: rank {} called {}, rank {} on {} called "
           "{}. Hint: every rank must make the same calls in the same order, with equal "
           "shapes and dtypes",
           local_.rank(), call_->description.to_string(call_->sequence), other.rank,
           other.host_name, theirs.call_text())});
  local_.throw_if_failed(call_);
  throw StateError("libddp: a mismatch was not kept");
}

std::byte* LinkStage::payload_of(std::size_t peer) {
  return incoming_[peer].bytes.data() + sizeof(LinkHeader);
}

std::size_t LinkStage::peer_on(int host) const {
  return static_cast<std::size_t>(host < host_ ? host : host - 1);
}

std::string LinkStage::name_of(const LinkPeer& peer) const {
  return fmt::format("rank {} (pid {} on {})", peer.rank, peer.pid, peer.host_name);
}

std::optional<std::string> LinkStage::last_call_of(int rank) const {
  const std::lock_guard lock(last_calls_mutex_);
  const auto found = last_calls_.find(rank);
  if (found == last_calls_.end()) return std::nullopt;
  return found->second;
}

void LinkStage::all_gather(const std::vector<Region>& regions) {
  const Region& own = regions[static_cast<std::size_t>(host_)];
  std::vector<std::size_t> sizes;
  bool is_small = own.bytes <= kSmallBytes;
  for (const LinkPeer& peer : peers_) {
    sizes.push_back(regions[static_cast<std::size_t>(peer.host)].bytes);
    is_small = is_small && sizes.back() <= kSmallBytes;
  }
  if (is_small) {
    exchange(own, sizes);
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      std::byte* to = regions[static_cast<std::size_t>(peers_[i].host)].data;
      if (sizes[i] > 0) std::memcpy(to, payload_of(i), sizes[i]);
    }
    return;
  }
  barrier();
  LinkPump pump(*this);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int peer = static_cast<int>(i);
    std::byte* theirs = regions[static_cast<std::size_t>(peers_[i].host)].data;
    pump.add(peers_[i].result, {true, peer, own.data, own.bytes, own.bytes});
    pump.add(peers_[i].result, {false, peer, theirs, sizes[i], sizes[i]});
  }
  while (!pump.is_done()) {
    if (!pump.move()) pump.wait();
  }
}

// A chain that starts at the root's host: each host passes on what it has while more is coming.
void LinkStage::broadcast(std::byte* data, std::size_t bytes, int root_host) {
  const bool is_root = host_ == root_host;
  if (bytes <= kSmallBytes) {
    std::vector<std::size_t> sizes(peers_.size(), 0);
    if (!is_root) sizes[peer_on(root_host)] = bytes;
    exchange({data, is_root ? bytes : 0}, sizes);
    if (!is_root && bytes > 0) std::memcpy(data, payload_of(peer_on(root_host)), bytes);
    return;
  }
  barrier();
  LinkPump pump(*this);
  LinkFlow* from = nullptr;
  LinkFlow* to = nullptr;
  const auto neighbour = [&](int step) {
    return peer_on((host_ + num_hosts() + step) % num_hosts());
  };
  if (!is_root) {
    const std::size_t i = neighbour(-1);
    from = &pump.add(peers_[i].result, {false, static_cast<int>(i), data, bytes, bytes});
  }
  if ((host_ + 1) % num_hosts() != root_host) {
    const std::size_t i = neighbour(1);
    to = &pump.add(peers_[i].result, {true, static_cast<int>(i), data, bytes, is_root ? bytes : 0});
  }
  while (!pump.is_done()) {
    const bool moved = pump.move();
    if (from != nullptr && to != nullptr) to->open = from->done;
    if (!moved) pump.wait();
  }
}

void LinkStage::check(const std::deque<LinkFlow>& flows) {
  local_.throw_if_failed(call_);
  check_interrupt();
  if (!deadline_.expired()) return;
  std::set<int> waited_for;
  for (const bool only_open : {true, false}) {
    if (!waited_for.empty()) break;
    for (const LinkFlow& flow : flows) {
      if (only_open ? flow.can_move() : !flow.is_done()) waited_for.insert(flow.peer);
    }
  }
  std::vector<std::string> names;
  for (const int i : waited_for) {
    const LinkPeer& peer = peers_[static_cast<std::size_t>(i)];
    names.push_back(fmt::format("rank {} (pid {} on {}, last call: {})", peer.rank, peer.pid,
                                peer.host_name,
                                last_call_of(peer.rank).value_or("not known here")));
  }
  std::vector<int> ranks;
  for (const int i : waited_for) ranks.push_back(peers_[static_cast<std::size_t>(i)].rank);
  const std::string notes = call_->notes ? (*call_->notes)(ranks) : "";
  const std::chrono::duration<double> waited = Deadline::Clock::now() - start_;
  const LinkPeer& first = peers_[static_cast<std::size_t>(*waited_for.begin())];
  const bool is_one = waited_for.size() == 1;
  local_.fail(
      {GroupFailure::Kind::Timeout,
       fmt::format(
           "{}: timed out after {:.1f} s waiting for {}{}. Hint: look at what that rank does; "
           "if it is only slow, raise the timeout of the group",
           call_->description.to_string(call_->sequence), waited.count(), fmt::join(names, ", "),
           notes),
       is_one ? first.rank : -1, is_one ? first.pid : 0});
  local_.throw_if_failed(call_);
}

void LinkStage::report_lost(const LinkFlow& flow, int socket, int error) {
  const Deadline patience = Deadline::after(kCausePatience);
  while (!patience.expired()) {
    local_.throw_if_failed(call_);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const LinkPeer& peer = peers_[static_cast<std::size_t>(flow.peer)];
  GroupFailure failure = lost_connection({peer.rank, peer.pid, name_of(peer)}, socket, error);
  failure.message =
      fmt::format("{}: {}", call_->description.to_string(call_->sequence), failure.message);
  local_.fail(std::move(failure));
  local_.throw_if_failed(call_);
}

void LinkStage::all_reduce(std::byte* data, std::size_t count, const Reduction& reduction,
                           int num_averaged) {
  const std::size_t element = element_bytes(reduction.dtype);
  if (count * element <= kSmallBytes) return reduce_small(data, count, reduction, num_averaged);
  std::vector<Region> segments = segments_of(data, count, element);
  std::byte* own = segments[static_cast<std::size_t>(host_)].data;
  reduce_large(std::move(segments), own, true, reduction, num_averaged);
}

void LinkStage::all_reduce_prepared(std::byte* data, std::size_t count, const Reduction& reduction,
                                    int num_averaged, Preparation& preparation) {
  const std::size_t element = element_bytes(reduction.dtype);
  if (count * element <= kSmallBytes) {
    return InterStage::all_reduce_prepared(data, count, reduction, num_averaged, preparation);
  }
  std::vector<Region> segments = segments_of(data, count, element);
  std::byte* own = segments[static_cast<std::size_t>(host_)].data;
  reduce_large(std::move(segments), own, true, reduction, num_averaged, &preparation);
}

std::vector<InterStage::Region> LinkStage::segments_of(std::byte* data, std::size_t count,
                                                       std::size_t element) const {
  std::vector<Region> segments;
  for (int host = 0; host < num_hosts(); ++host) {
    const Slice slice = segment_of(count, element, host, num_hosts());
    segments.push_back({data + slice.begin * element, slice.count() * element});
  }
  return segments;
}

void LinkStage::reduce_scatter(const std::vector<Region>& regions, int /*host*/, std::byte* output,
                               const Reduction& reduction, int num_averaged) {
  reduce_large(regions, output, false, reduction, num_averaged);
}

// Everyone reduces everything, in the same order.
void LinkStage::reduce_small(std::byte* data, std::size_t count, const Reduction& reduction,
                             int divisor) {
  const std::size_t bytes = count * element_bytes(reduction.dtype);
  exchange({data, bytes}, std::vector<std::size_t>(peers_.size(), bytes));
  if (count == 0) return;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(num_hosts()), data);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    sources[static_cast<std::size_t>(peers_[i].host)] = payload_of(i);
  }
  reduce_hosts(reduction, divisor, sources, data, count);
}

void LinkStage::reduce_large(std::vector<Region> segments, std::byte* output, bool spreads,
                             const Reduction& reduction, int divisor, Preparation* preparation) {
  // The ranks of this host have come together before any byte leaves it.
  bool is_preparing = preparation != nullptr && preparation->step();
  barrier();
  const bool is_sum = reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Avg;
  const LinkSum::Job job{
      .segments = std::move(segments),
      .output = output,
      .reduction = reduction,
      .num_averaged = divisor,
      .spreads = spreads,
      .narrows = narrows_floats_ && reduction.dtype == Dtype::Float32 && is_sum,
  };
  LinkPump pump(*this);
  LinkSum sum(pump, peers_, buffers_, host_, job);
  if (is_preparing) sum.hold(preparation->ready());
  while (is_preparing || !pump.is_done()) {
    const bool moved = pump.move();
    const bool computed = sum.compute();
    if (is_preparing) {
      // Nobody waits for the network here: the other ranks of the host wait in the next piece.
      is_preparing = preparation->step();
      sum.hold(preparation->ready());
    } else if (!computed && !moved) {
      pump.wait();
    }
  }
}

}  // namespace libddp
