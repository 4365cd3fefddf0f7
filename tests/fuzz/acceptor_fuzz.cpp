// The accepting side of the connections between hosts (link_acceptor.h), with a key that the input
// does not know and with tokens that it can guess.

#include "libddp/bootstrap/link_acceptor.h"

#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

bool is_expected(const LinkPlace& place) {
  return place.rank == 1 && place.kind <= LinkKind::Collectives && place.index < 2;
}

LinkAcceptor make_acceptor(LinkProver prover) {
  return LinkAcceptor(TcpListener::open("127.0.0.1"), 0, std::move(prover), is_expected);
}

/// More than may stand there at once, and say nothing.
void crowd(LinkAcceptor& acceptor, std::vector<AdmittedLink>& all_admitted) {
  std::vector<UniqueFd> silent;
  for (std::size_t i = 0; i <= LinkAcceptor::kMostPending; ++i) {
    fuzz::Pair pair = fuzz::Pair::make();
    silent.push_back(std::move(pair.theirs));
    acceptor.take_in(std::move(pair.ours), all_admitted);
  }
  fuzz::require(acceptor.num_pending() <= LinkAcceptor::kMostPending);
  std::vector<pollfd> entries;
  acceptor.add_polls(entries);
  fuzz::require(entries.size() <= LinkAcceptor::kMostPending + 1);
}

/// Who got in.
std::vector<AdmittedLink> visit(LinkAcceptor& acceptor, fuzz::Bytes input) {
  fuzz::Pair pair = fuzz::Pair::make();
  std::vector<AdmittedLink> all_admitted;
  // The one input that every run begins with.
  if (input.is_empty()) crowd(acceptor, all_admitted);
  pair.send(input.piece());
  acceptor.take_in(std::move(pair.ours), all_admitted);
  while (!input.is_empty()) {
    pair.send(input.piece());
    for (AdmittedLink& admitted : acceptor.admit()) all_admitted.push_back(std::move(admitted));
  }
  pair.theirs.reset();
  for (AdmittedLink& admitted : acceptor.admit()) all_admitted.push_back(std::move(admitted));
  fuzz::require(acceptor.num_pending() == 0);  // the other end has closed
  return all_admitted;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static LinkAcceptor sealed =
      make_acceptor(LinkProver(RunKey::from_bytes(std::string(32, 'k')), {}));
  static LinkAcceptor open =
      make_acceptor(LinkProver(nullptr, [](int) { return std::string(32, 'a'); }));
  fuzz::require(visit(sealed, {data, size}).empty());
  for (const AdmittedLink& admitted : visit(open, {data, size})) {
    fuzz::require(is_expected(admitted.place));
  }
  return 0;
}
