// What keepers of other hosts say, once they have proved themselves: whatever comes, a replica is
// what was stored or is not there, and the one from before stays.
//
// The first byte says how sound the rest is: anything; a head with the right sum; a sound stream in
// which some bytes are others. The last is where the deeper parts are reached.

#include <cstring>
#include <memory>

#include "libddp/base/error.h"
#include "libddp/keeper/replica_feed.h"
#include "libddp/keeper/replica_receiver.h"
#include "libddp/slots/scatter.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

constexpr std::uint64_t kSequence = 7;
const ReplicaPlace kPlace{.run = "job", .rank = 1, .generation = 3, .sequence = kSequence};

std::shared_ptr<SlotMemory> make_memory() {
  auto memory = std::make_shared<SlotMemory>(SlotMemory::create(
      PieceLayout::of({{.key = "w", .dtype = "F32", .shape = {100}, .begin = 0, .end = 100}}),
      {.run = "job", .rank = 1, .world_size = 2, .generation = 3}, 256));
  const std::vector<std::byte> tensor(400, std::byte{7});
  const std::span<const std::byte> sources[] = {tensor};
  memory->slot(0).fill({.step = 1, .sequence = kSequence}, sources, "{}", 1);
  return memory;
}

std::string sound_stream() {
  ReplicaFeed feed(HeldSave::of(make_memory(), 0));
  std::string all;
  while (!feed.rest().empty()) {
    all.append(reinterpret_cast<const char*>(feed.rest().data()), feed.rest().size());
    feed.advance(feed.rest().size());
  }
  return all;
}

/// The front of `text` with the right frame, so that what it says is looked at.
template <typename Message>
Message sealed(const std::string& text, std::uint32_t version) {
  Message message;
  std::memcpy(static_cast<void*>(&message), text.data(), std::min(text.size(), sizeof(message)));
  message.magic = Message::kMagic;
  message.version = version;
  return message;
}

std::string stream_of(int kind, std::string text) {
  static const std::string sound = sound_stream();
  if (kind == 0) return text;
  if (kind == 1) {
    auto head = sealed<ReplicaHead>(text, ReplicaRequest::kVersion);
    head.rank = kPlace.rank;
    head.generation = kPlace.generation;
    head.sequence = kPlace.sequence;
    head.seal();
    text.resize(std::max(text.size(), sizeof(head)));
    std::memcpy(text.data(), &head, sizeof(head));
    return text;
  }
  std::string changed = sound;
  for (std::size_t i = 0; i + 2 < text.size(); i += 3) {
    const auto at = static_cast<unsigned char>(text[i]) | static_cast<unsigned char>(text[i + 1])
                                                              << 8;
    changed[static_cast<std::size_t>(at) % changed.size()] ^= text[i + 2];
  }
  return changed;
}

void receive(const std::string& stream_text, bool has_known) {
  static const std::shared_ptr<SlotMemory> memory = make_memory();
  fuzz::Pair pair = fuzz::Pair::make();
  pair.send(stream_text);
  pair.end();
  ReplicaStream stream(std::move(pair.ours), -1, std::chrono::milliseconds(1000));
  const KeptReplicas::Replica known{.memory = has_known ? memory : nullptr, .newest_slot = 0};
  const auto limit = [] { return MemoryLimit{.available_bytes = 1u << 20, .source = "a test"}; };
  try {
    const auto replica = ReplicaReceiver(stream, kPlace).receive(known, limit);
    const SlotMemory& received = *replica.memory;
    fuzz::require(received.slot(replica.newest_slot).whole().has_value());
    verify(SlotSource(received, replica.newest_slot));
    if (has_known) fuzz::require(replica.newest_slot == 1 || replica.memory != memory);
  } catch (const SnapshotError&) {
  } catch (const NetworkError&) {
  }
  fuzz::require(memory->slot(0).whole() == SavedStep{1, kSequence});
}

void read_request(const std::string& text) {
  auto request = sealed<ReplicaRequest>(text, ReplicaRequest::kVersion);
  try {
    request.check();
    fuzz::require(false);  // nobody guesses the sum
  } catch (const NetworkError&) {
  }
  request.run.back() = '\0';
  request.rank &= 0x7fffffff;
  const ReplicaPlace place = ReplicaRequest::make(request.place()).place();
  fuzz::require(place.rank == request.rank && place.sequence == request.sequence);
}

void read_address(const std::string& text) {
  try {
    const TcpEndpoint endpoint = parse_endpoint(text);
    fuzz::require(parse_endpoint(endpoint.to_string()).to_string() == endpoint.to_string());
  } catch (const SnapshotError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  receive(stream_of(data[0] % 3, text), (data[0] & 128) != 0);
  read_request(text);
  read_address(text);
  return 0;
}
