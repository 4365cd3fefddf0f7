#include "libddp/bootstrap/link_door.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace libddp {
namespace {

bool send_reply(int socket, LinkRefusal refusal, const std::array<char, 32>& bytes) {
  LinkReply reply;
  reply.refusal = refusal;
  reply.bytes = bytes;
  // A fresh connection's buffer takes it whole; one whose does not is of no use.
  return ::send(socket, &reply, sizeof(reply), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(reply));
}

}  // namespace

LinkDoor::LinkDoor(TcpListener listener, int own_rank, LinkProver prover, IsExpected is_expected)
    : listener_(std::move(listener)),
      own_rank_(own_rank),
      prover_(std::move(prover)),
      is_expected_(std::move(is_expected)),
      strangers_(kPatience, RefusalLog("link_refused", listener_.endpoint().to_string())) {}

void LinkDoor::add_polls(std::vector<pollfd>& entries) const {
  strangers_.add_polls(listener_.fd(), entries);
}

std::vector<LinkGuest> LinkDoor::admit() {
  std::vector<LinkGuest> guests;
  const auto hear = [&](Stranger& stranger) { welcome(stranger, guests); };
  strangers_.hear_all(hear);
  strangers_.accept_from(listener_, hear);
  return guests;
}

void LinkDoor::take_in(UniqueFd socket, std::vector<LinkGuest>& guests) {
  strangers_.take_in(std::move(socket), [&](Stranger& stranger) { welcome(stranger, guests); });
}

void LinkDoor::welcome(Stranger& stranger, std::vector<LinkGuest>& guests) {
  switch (advance(stranger)) {
    case Step::Waits:
      return;
    case Step::Over:
      return stranger.socket.reset();
    case Step::Proved:
      guests.push_back({{stranger.hello.rank, stranger.hello.kind, stranger.hello.index},
                        std::move(stranger.socket)});
  }
}

LinkDoor::Step LinkDoor::advance(Stranger& stranger) {
  Step step = Step::Waits;
  if (!stranger.is_heard) {
    auto* hello = reinterpret_cast<char*>(&stranger.hello);
    // Of another version nothing but the prefix is known.
    if (stranger.num_bytes < LinkHello::kPrefixBytes &&
        !read_until(stranger, hello, LinkHello::kPrefixBytes, step)) {
      return step;
    }
    if (!stranger.hello.is_libddp()) {
      strangers_.report("no libddp");
      return Step::Over;
    }
    if (!stranger.hello.is_this_version()) return refuse(stranger, LinkRefusal::Version);
    if (!read_until(stranger, hello, sizeof(LinkHello), step)) return step;
    step = check_hello(stranger);
    if (step != Step::Waits) return step;
  }
  if (!read_until(stranger, stranger.proof.data(), stranger.proof.size(), step)) return step;
  return check_proof(stranger);
}

// Reads up to `bytes` in all; false, with the reason in `step`, if they have not come yet.
bool LinkDoor::read_until(Stranger& stranger, char* data, std::size_t bytes, Step& step) {
  while (stranger.num_bytes < bytes) {
    const ssize_t got = ::recv(stranger.socket.get(), data + stranger.num_bytes,
                               bytes - stranger.num_bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got > 0) {
      stranger.num_bytes += static_cast<std::size_t>(got);
      continue;
    }
    const bool waits = got < 0 && errno == EAGAIN && !stranger.patience.expired();
    if (got < 0 && errno == EAGAIN && !waits) strangers_.report("too slow");
    step = waits ? Step::Waits : Step::Over;
    return false;
  }
  return true;
}

LinkDoor::Step LinkDoor::check_hello(Stranger& stranger) {
  const LinkHello& hello = stranger.hello;
  const LinkPlace place{hello.rank, hello.kind, hello.index};
  if (hello.to_rank != own_rank_ || !is_expected_(place)) {
    return refuse(stranger, LinkRefusal::Place);
  }
  stranger.nonce = new_link_nonce();
  stranger.num_bytes = 0;
  stranger.is_heard = true;
  const bool is_sent = send_reply(stranger.socket.get(), LinkRefusal::None, stranger.nonce);
  return is_sent ? Step::Waits : Step::Over;
}

LinkDoor::Step LinkDoor::check_proof(Stranger& stranger) {
  const LinkHello& hello = stranger.hello;
  if (!prover_.is_proof(stranger.proof, LinkSide::Connects, hello, stranger.nonce)) {
    return refuse(stranger, LinkRefusal::Proof);
  }
  // Another connection may have had the place in the meantime.
  if (!is_expected_({hello.rank, hello.kind, hello.index})) {
    return refuse(stranger, LinkRefusal::Place);
  }
  const LinkProof own = prover_.prove(LinkSide::Accepts, hello, stranger.nonce);
  return send_reply(stranger.socket.get(), LinkRefusal::None, own) ? Step::Proved : Step::Over;
}

LinkDoor::Step LinkDoor::refuse(Stranger& stranger, LinkRefusal refusal) {
  send_reply(stranger.socket.get(), refusal, {});
  // Bytes that nobody has read would make the kernel withdraw the reply.
  char rest[1024];
  static_cast<void>(::recv(stranger.socket.get(), rest, sizeof(rest), MSG_DONTWAIT));
  switch (refusal) {
    case LinkRefusal::Version:
      strangers_.report("version " + std::to_string(stranger.hello.version) +
                        " of the handshake, not " + std::to_string(LinkHello::kVersion));
      break;
    case LinkRefusal::Place:
      strangers_.report("not expected here");
      break;
    default:
      strangers_.report("wrong proof");
  }
  return Step::Over;
}

}  // namespace libddp
