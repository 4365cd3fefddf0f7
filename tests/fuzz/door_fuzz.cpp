// The accepting side of the connections between hosts (link_door.h), with a key that the input does
// not know and with tokens that it can guess.

#include "libddp/bootstrap/link_door.h"

#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

bool is_expected(const LinkPlace& place) {
  return place.rank == 1 && place.kind <= LinkKind::Collectives && place.index < 2;
}

LinkDoor make_door(LinkProver prover) {
  return LinkDoor(TcpListener::open("127.0.0.1"), 0, std::move(prover), is_expected);
}

/// More than may stand there at once, and say nothing.
void crowd(LinkDoor& door, std::vector<LinkGuest>& guests) {
  std::vector<UniqueFd> silent;
  for (std::size_t i = 0; i <= LinkDoor::kMostStrangers; ++i) {
    fuzz::Pair pair = fuzz::Pair::make();
    silent.push_back(std::move(pair.theirs));
    door.take_in(std::move(pair.ours), guests);
  }
  fuzz::require(door.num_strangers() <= LinkDoor::kMostStrangers);
  std::vector<pollfd> entries;
  door.add_polls(entries);
  fuzz::require(entries.size() <= LinkDoor::kMostStrangers + 1);
}

/// Who got in.
std::vector<LinkGuest> visit(LinkDoor& door, fuzz::Bytes input) {
  fuzz::Pair pair = fuzz::Pair::make();
  std::vector<LinkGuest> guests;
  // The one input that every run begins with.
  if (input.is_empty()) crowd(door, guests);
  pair.send(input.piece());
  door.take_in(std::move(pair.ours), guests);
  while (!input.is_empty()) {
    pair.send(input.piece());
    for (LinkGuest& guest : door.admit()) guests.push_back(std::move(guest));
  }
  pair.theirs.reset();
  for (LinkGuest& guest : door.admit()) guests.push_back(std::move(guest));
  fuzz::require(door.num_strangers() == 0);  // the other end has closed
  return guests;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static LinkDoor sealed = make_door(LinkProver(RunKey::from_bytes(std::string(32, 'k')), {}));
  static LinkDoor open = make_door(LinkProver(nullptr, [](int) { return std::string(32, 'a'); }));
  fuzz::require(visit(sealed, {data, size}).empty());
  for (const LinkGuest& guest : visit(open, {data, size})) {
    fuzz::require(is_expected(guest.place));
  }
  return 0;
}
