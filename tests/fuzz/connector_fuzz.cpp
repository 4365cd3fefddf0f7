// The connecting side of the connections between hosts (link_connector.h): what a listener may
// answer.

#include "libddp/bootstrap/link_connector.h"

#include "libddp/base/error.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

namespace {

// A listener that closes at once: it is tried again later.
void connect_to_a_wall(const LinkProver& prover) {
  TcpListener wall = TcpListener::open("127.0.0.1");
  LinkConnector connector({0, LinkKind::Control, 0}, 1, wall.endpoint());
  connector.connect(Deadline::never());
  wall.accept().reset();
  while (connector.socket() >= 0) fuzz::require(!connector.advance(prover));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const LinkProver prover(RunKey::from_bytes(std::string(32, 'k')), {});
  if (size == 0) connect_to_a_wall(prover);
  fuzz::Bytes input(data, size);
  fuzz::Pair pair = fuzz::Pair::make();
  LinkConnector connector({0, LinkKind::Control, 0}, 1, {"127.0.0.1", 1});
  connector.greet(std::move(pair.ours), Deadline::never());
  try {
    while (!input.is_empty()) {
      pair.send(input.piece());
      fuzz::require(!connector.advance(prover));  // nobody can prove the key
    }
    pair.theirs.reset();
    fuzz::require(!connector.advance(prover));
    fuzz::require(connector.socket() < 0);
  } catch (const NetworkError&) {
  }
  return 0;
}
