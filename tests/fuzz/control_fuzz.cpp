// Messages between ranks on the control connections (control_message.h).

#include "libddp/watchdog/control_message.h"
#include "libddp/watchdog/control_outbox.h"

#include "tests/fuzz/fuzz.h"

using namespace libddp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes input(data, size);
  const fuzz::Pair pair = fuzz::Pair::make();
  ControlInbox inbox;
  while (!input.is_empty() && !inbox.is_garbled()) {
    pair.send(input.piece());
    for (const ControlMessage& message : inbox.take(pair.ours.get())) {
      fuzz::require(message.failure.message.size() <= ControlMessage::kMaxText);
      // What was understood can be said again.
      const fuzz::Pair again = fuzz::Pair::make();
      ControlOutbox outbox;
      fuzz::require(outbox.send(again.theirs.get(), message) && outbox.is_empty());
      ControlInbox second;
      fuzz::require(second.take(again.ours.get()).size() == 1 && !second.is_garbled());
    }
  }
  pair.end();
  inbox.take(pair.ours.get());
  return 0;
}
