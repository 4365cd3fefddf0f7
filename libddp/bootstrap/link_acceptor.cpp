#include "libddp/bootstrap/link_acceptor.h"

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

LinkAcceptor::LinkAcceptor(TcpListener listener, int own_rank, LinkProver prover,
                           IsExpected is_expected)
    : listener_(std::move(listener)),
      own_rank_(own_rank),
      prover_(std::move(prover)),
      is_expected_(std::move(is_expected)),
      pending_(kPatience, RefusalLog("link_refused", listener_.endpoint().to_string())) {}

void LinkAcceptor::add_polls(std::vector<pollfd>& entries) const {
  pending_.add_polls(listener_.fd(), entries);
}

std::vector<AdmittedLink> LinkAcceptor::admit() {
  std::vector<AdmittedLink> all_admitted;
  const auto hear = [&](Pending& pending) { welcome(pending, all_admitted); };
  pending_.hear_all(hear);
  pending_.accept_from(listener_, hear);
  return all_admitted;
}

void LinkAcceptor::take_in(UniqueFd socket, std::vector<AdmittedLink>& all_admitted) {
  pending_.take_in(std::move(socket), [&](Pending& pending) { welcome(pending, all_admitted); });
}

void LinkAcceptor::welcome(Pending& pending, std::vector<AdmittedLink>& all_admitted) {
  switch (advance(pending)) {
    case Step::Waits:
      return;
    case Step::Over:
      return pending.socket.reset();
    case Step::Proved:
      all_admitted.push_back({{pending.request.rank, pending.request.kind, pending.request.index},
                              std::move(pending.socket)});
  }
}

LinkAcceptor::Step LinkAcceptor::advance(Pending& pending) {
  Step step = Step::Waits;
  if (!pending.is_heard) {
    auto* request = reinterpret_cast<char*>(&pending.request);
    // Of another version nothing but the prefix is known.
    if (pending.num_bytes < LinkRequest::kPrefixBytes &&
        !read_until(pending, request, LinkRequest::kPrefixBytes, step)) {
      return step;
    }
    if (!pending.request.is_libddp()) {
      pending_.report("no libddp");
      return Step::Over;
    }
    if (!pending.request.is_this_version()) return refuse(pending, LinkRefusal::Version);
    if (!read_until(pending, request, sizeof(LinkRequest), step)) return step;
    step = check_request(pending);
    if (step != Step::Waits) return step;
  }
  if (!read_until(pending, pending.proof.data(), pending.proof.size(), step)) return step;
  return check_proof(pending);
}

// Reads up to `bytes` in all; false, with the reason in `step`, if they have not come yet.
bool LinkAcceptor::read_until(Pending& pending, char* data, std::size_t bytes, Step& step) {
  while (pending.num_bytes < bytes) {
    const ssize_t got = ::recv(pending.socket.get(), data + pending.num_bytes,
                               bytes - pending.num_bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got > 0) {
      pending.num_bytes += static_cast<std::size_t>(got);
      continue;
    }
    const bool waits = got < 0 && errno == EAGAIN && !pending.patience.expired();
    if (got < 0 && errno == EAGAIN && !waits) pending_.report("too slow");
    step = waits ? Step::Waits : Step::Over;
    return false;
  }
  return true;
}

LinkAcceptor::Step LinkAcceptor::check_request(Pending& pending) {
  const LinkRequest& request = pending.request;
  const LinkPlace place{request.rank, request.kind, request.index};
  if (request.to_rank != own_rank_ || !is_expected_(place)) {
    return refuse(pending, LinkRefusal::Place);
  }
  pending.nonce = new_link_nonce();
  pending.num_bytes = 0;
  pending.is_heard = true;
  const bool is_sent = send_reply(pending.socket.get(), LinkRefusal::None, pending.nonce);
  return is_sent ? Step::Waits : Step::Over;
}

LinkAcceptor::Step LinkAcceptor::check_proof(Pending& pending) {
  const LinkRequest& request = pending.request;
  if (!prover_.is_proof(pending.proof, LinkSide::Connects, request, pending.nonce)) {
    return refuse(pending, LinkRefusal::Proof);
  }
  // Another connection may have had the place in the meantime.
  if (!is_expected_({request.rank, request.kind, request.index})) {
    return refuse(pending, LinkRefusal::Place);
  }
  const LinkProof own = prover_.prove(LinkSide::Accepts, request, pending.nonce);
  return send_reply(pending.socket.get(), LinkRefusal::None, own) ? Step::Proved : Step::Over;
}

LinkAcceptor::Step LinkAcceptor::refuse(Pending& pending, LinkRefusal refusal) {
  send_reply(pending.socket.get(), refusal, {});
  // Bytes that nobody has read would make the kernel withdraw the reply.
  char rest[1024];
  static_cast<void>(::recv(pending.socket.get(), rest, sizeof(rest), MSG_DONTWAIT));
  switch (refusal) {
    case LinkRefusal::Version:
      pending_.report("version " + std::to_string(pending.request.version) +
                      " of the handshake, not " + std::to_string(LinkRequest::kVersion));
      break;
    case LinkRefusal::Place:
      pending_.report("not expected here");
      break;
    default:
      pending_.report("wrong proof");
  }
  return Step::Over;
}

}  // namespace libddp
