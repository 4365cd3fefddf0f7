// Point-to-point messages from a rank of another host (link_messages.h), after its proof: whatever
// it sends, this rank's memory and its other messages stay whole.

#include "libddp/collectives/link_messages.h"

#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/lone_host.h"

using namespace libddp;

namespace {

constexpr std::size_t kLargeBytes = LinkMessages::kInlineBytes + 1000;

// What this rank has in flight: small, large and empty, in both directions, and from anybody.
class Desk {
 public:
  Desk() {
    for (const bool is_send : {false, true}) {
      add(is_send, 1, 0, 24);
      add(is_send, 1, 1, kLargeBytes);
      add(is_send, 1, 2, 0);
    }
    add(false, -1, 3, 24);
    add(false, -1, 4, kLargeBytes);
    for (Comm::Transfer& transfer : transfers_) parts_.push_back(&transfer);
  }

  /// This rank waits for it no more.
  void give_up(std::size_t number) {
    if (!parts_.empty()) parts_.erase(parts_.begin() + static_cast<long>(number % parts_.size()));
  }

  void progress(Mailbox& mailbox) {
    while (mailbox.progress(parts_)) {
    }
    std::erase_if(parts_, [](const Comm::Transfer* part) {
      if (!part->is_done) return false;
      fuzz::require(part->is_send || part->source == 1);
      const bool is_large = part->bytes > LinkMessages::kInlineBytes;
      fuzz::require(!is_large || part->moved_bytes == part->bytes);
      return true;
    });
  }

 private:
  void add(bool is_send, int peer, int tag, std::size_t bytes) {
    Comm::Transfer& transfer = transfers_.emplace_back();
    // Of exactly this size, so that the sanitizer sees a byte too many.
    memory_.push_back(std::make_unique<std::byte[]>(bytes));
    transfer.is_send = is_send;
    transfer.peer = peer;
    transfer.tag = tag;
    transfer.data = memory_.back().get();
    transfer.bytes = bytes;
  }

  std::deque<Comm::Transfer> transfers_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<Comm::Transfer*> parts_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Bytes input(data, size);
  const std::unique_ptr<ShmComm> local = test::lone_host();
  fuzz::Pair pair = fuzz::Pair::make();
  std::vector<LinkMessagesPeer> peers;
  peers.push_back({1, 1, "there", std::move(pair.ours)});
  LinkMessages links(*local, std::move(peers));
  Mailbox mailbox(*local, {&local->messages(), &links});
  Desk desk;
  try {
    desk.progress(mailbox);
    while (!input.is_empty()) {
      const std::string piece = input.piece();
      // An empty one stands for much: large messages do not fit into an input.
      if (piece.size() == 1) {
        desk.give_up(static_cast<unsigned char>(piece[0]));
      } else {
        pair.send(piece.empty() ? std::string(1000, 'x') : piece);
      }
      links.on_network();
      desk.progress(mailbox);
    }
    pair.end();
    desk.progress(mailbox);
    links.finish();
    fuzz::require(links.has_read_all(1) && links.has_read_all(0));
  } catch (const PeerError&) {
    fuzz::require(local->failure().has_value());
  }
  return 0;
}
