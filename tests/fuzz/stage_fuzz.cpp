// Collectives with a rank of another host (link_stage.h), after its proof: what an honest one would
// send, with some of its bytes changed.

#include "libddp/collectives/link_stage.h"

#include <cstring>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/lone_host.h"

using namespace libddp;

namespace {

constexpr std::size_t kSmallFloats = 100;
constexpr std::size_t kLargeFloats = 10000;
/// Over two connections, more than a stripe on each.
constexpr std::size_t kStripedFloats = 40000;

/// What this rank calls: the first byte of the input chooses.
struct Choice {
  Choice(const std::string& text, std::size_t size) {
    const unsigned number = text.empty() ? 0 : static_cast<unsigned char>(text[0]);
    constexpr OpKind kKinds[] = {OpKind::AllReduce, OpKind::ReduceScatter, OpKind::AllGather,
                                 OpKind::Broadcast, OpKind::Barrier};
    kind = kKinds[number % 5];
    is_large = (number / 5) % 2 == 1;
    is_narrow = (number / 10) % 2 == 1;
    is_striped = is_large && (number / 20) % 2 == 1;
    // A rank that stops in the middle; each costs the patience of a poll, so there are few.
    is_cut = number == 255 && size <= 4;
    count = kSmallFloats;
    if (is_large) count = is_striped ? kStripedFloats : kLargeFloats;
    if (kind == OpKind::Barrier) count = 0;
  }

  CommCall call() const {
    CommCall call;
    call.sequence = 7;
    call.description.kind = kind;
    call.description.dtype = Dtype::Float32;
    call.description.count = count;
    call.description.root = kind == OpKind::Broadcast ? 1 : -1;
    if (is_cut) call.deadline = Deadline::after(std::chrono::seconds(0));
    return call;
  }
  /// What travels with the header.
  std::size_t header_payload() const {
    if (is_large || kind == OpKind::ReduceScatter) return 0;
    return (kind == OpKind::AllGather ? count / 2 : count) * sizeof(float);
  }
  /// At least what any of the calls reads from one connection.
  std::size_t stream_bytes() const {
    if (is_cut) return 0;
    const std::size_t bytes = count * sizeof(float);
    return is_striped ? bytes / 2 + LinkPump::kStripeBytes : bytes;
  }

  OpKind kind;
  bool is_large;
  bool is_narrow;
  bool is_striped;
  bool is_cut;
  std::size_t count;
};

// Three bytes each: where, and what to change there.
void twist(std::string& stream, const std::string& changes) {
  for (std::size_t i = 0; i + 2 < changes.size(); i += 3) {
    const auto low = static_cast<unsigned char>(changes[i]);
    const auto high = static_cast<unsigned char>(changes[i + 1]);
    const std::size_t at = (low | static_cast<std::size_t>(high) << 8) % stream.size();
    stream[at] = static_cast<char>(stream[at] ^ changes[i + 2]);
  }
}

// A connection on which `text` has come; the other end is kept in `theirs`.
UniqueFd connection(const std::string& text, std::vector<UniqueFd>& theirs) {
  fuzz::Pair pair = fuzz::Pair::make();
  fuzz::require(pair.send(text));
  theirs.push_back(std::move(pair.theirs));
  return std::move(pair.ours);
}

void run(LinkStage& stage, const Choice& choice, const CommCall& call) {
  std::vector<float> floats(choice.count);
  auto* data = reinterpret_cast<std::byte*>(floats.data());
  const std::size_t half = choice.count / 2 * sizeof(float);
  const std::vector<InterStage::Region> regions{{data, half}, {data + half, half}};
  const Reduction reduction{Dtype::Float32, ReduceOp::Sum, 1.0};
  stage.begin(call);
  switch (choice.kind) {
    case OpKind::AllReduce:
      return stage.all_reduce(data, choice.count, reduction, 2);
    case OpKind::ReduceScatter:
      return stage.reduce_scatter(regions, 0, data, reduction, 2);
    case OpKind::AllGather:
      return stage.all_gather(regions);
    case OpKind::Broadcast:
      return stage.broadcast(data, 2 * half, 1);
    default:
      return stage.barrier();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes input(data, size);
  const Choice choice(input.piece(), size);
  const CommCall call = choice.call();
  const LinkHeader header = LinkHeader::of(call, choice.header_payload());
  std::string give(reinterpret_cast<const char*>(&header), sizeof(header));
  give.resize(sizeof(header) + choice.stream_bytes());
  std::string result(choice.stream_bytes() + 1, '\0');
  twist(give, input.piece());
  twist(result, input.piece());

  const std::unique_ptr<ShmComm> local = test::lone_host();
  std::vector<LinkPeer> peers(1);
  peers[0].host = 1;
  peers[0].rank = 1;
  peers[0].host_name = "there";
  std::vector<UniqueFd> theirs;
  for (int i = 0; i < (choice.is_striped ? 2 : 1); ++i) {
    peers[0].give.push_back(connection(give, theirs));
    peers[0].result.push_back(connection(result, theirs));
    give.erase(0, sizeof(header));  // stands on the first one only
  }
  LinkStage stage(*local, 0, std::move(peers), choice.is_narrow);
  try {
    run(stage, choice, call);
    fuzz::require(!local->failure());
  } catch (const Error&) {
    const auto failure = local->failure();
    fuzz::require(failure.has_value());
    fuzz::require(choice.is_cut || failure->kind == GroupFailure::Kind::Peer);
  }
  stage.last_call_of(1);
  return 0;
}
