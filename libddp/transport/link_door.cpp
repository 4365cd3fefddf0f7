#include "libddp/transport/link_door.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "libddp/base/log.h"

namespace libddp {
namespace {

/// So many are accepted before those who wait are looked at again.
constexpr int kMaxAcceptsAtOnce = 256;
constexpr std::chrono::milliseconds kPauseWithoutDescriptors{20};
constexpr std::chrono::seconds kReportPeriod{1};

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
      is_expected_(std::move(is_expected)) {}

void LinkDoor::add_polls(std::vector<pollfd>& entries) const {
  if (pause_.expired()) entries.push_back({listener_.fd(), POLLIN, 0});
  for (const Stranger& stranger : strangers_) entries.push_back({stranger.socket.get(), POLLIN, 0});
}

std::vector<LinkGuest> LinkDoor::admit() {
  std::vector<LinkGuest> guests;
  for (Stranger& stranger : strangers_) welcome(stranger, guests);
  std::erase_if(strangers_, [](const Stranger& stranger) { return !stranger.socket; });
  if (pause_.expired()) accept_some(guests);
  return guests;
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

void LinkDoor::accept_some(std::vector<LinkGuest>& guests) {
  for (int i = 0; i < kMaxAcceptsAtOnce; ++i) {
    UniqueFd socket = listener_.accept();
    if (!socket && listener_.is_out_of_descriptors()) {
      report("too many open files");
      if (strangers_.empty()) {
        pause_ = Deadline::after(kPauseWithoutDescriptors);
        return;
      }
      make_room();
      continue;
    }
    if (!socket) return;
    take_in(std::move(socket), guests);
  }
}

void LinkDoor::take_in(UniqueFd socket, std::vector<LinkGuest>& guests) {
  if (strangers_.size() == kMaxStrangers) make_room();
  Stranger stranger;
  stranger.socket = std::move(socket);
  stranger.patience = Deadline::after(kPatience);
  // Most have said their hello by now, so a crowd cannot push out who belongs here unheard.
  welcome(stranger, guests);
  if (stranger.socket) strangers_.push_back(std::move(stranger));
}

void LinkDoor::make_room() {
  const auto silent = std::find_if(strangers_.begin(), strangers_.end(),
                                   [](const Stranger& each) { return !each.is_challenged; });
  strangers_.erase(silent == strangers_.end() ? strangers_.begin() : silent);
}

LinkDoor::Step LinkDoor::advance(Stranger& stranger) {
  Step step = Step::Waits;
  if (!stranger.is_challenged) {
    auto* hello = reinterpret_cast<char*>(&stranger.hello);
    // Of another version nothing but the prefix is known.
    if (stranger.num_bytes < LinkHello::kPrefixBytes &&
        !read_until(stranger, hello, LinkHello::kPrefixBytes, step)) {
      return step;
    }
    if (!stranger.hello.is_libddp()) {
      report("no libddp");
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
    if (got < 0 && errno == EAGAIN && !waits) report("too slow");
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
  stranger.is_challenged = true;
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
      report("version " + std::to_string(stranger.hello.version) + " of the handshake, not " +
             std::to_string(LinkHello::kVersion));
      break;
    case LinkRefusal::Place:
      report("not expected here");
      break;
    default:
      report("wrong proof");
  }
  return Step::Over;
}

void LinkDoor::report(const std::string& reason) {
  ++num_refused_;
  if (!next_report_.expired()) return;
  next_report_ = Deadline::after(kReportPeriod);
  log(LogLevel::Warn, "link_refused",
      {{"endpoint", listener_.endpoint().to_string()},
       {"reason", reason},
       {"num_refused", num_refused_}});
}

}  // namespace libddp
