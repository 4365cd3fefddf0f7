#include "libddp/bootstrap/link_connector.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <cerrno>

#include "libddp/base/error.h"

namespace libddp {
namespace {

constexpr std::chrono::milliseconds kPauseBeforeRetry{50};

}  // namespace

void LinkConnector::connect(Deadline deadline) {
  ++num_connects_;
  greet(connect_tcp(endpoint_, deadline), deadline);
}

void LinkConnector::greet(UniqueFd socket, Deadline deadline) {
  has_proved_ = false;
  num_bytes_ = 0;
  request_ = LinkRequest::make(place_, own_rank_);
  socket_ = std::move(socket);
  send_bytes(socket_.get(), &request_, sizeof(request_), deadline);
}

void LinkConnector::drop() {
  socket_.reset();
  pause_ = Deadline::after(kPauseBeforeRetry);
}

// True when a reply is there; drops the connection if it is over.
bool LinkConnector::read_reply() {
  auto* data = reinterpret_cast<char*>(&reply_);
  while (socket_ && num_bytes_ < sizeof(reply_)) {
    const ssize_t got =
        ::recv(socket_.get(), data + num_bytes_, sizeof(reply_) - num_bytes_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return false;
    if (got <= 0) {
      drop();
      return false;
    }
    num_bytes_ += static_cast<std::size_t>(got);
  }
  num_bytes_ = 0;
  return static_cast<bool>(socket_);
}

bool LinkConnector::advance(const LinkProver& prover) {
  while (socket_ && read_reply()) {
    if (reply_.magic != LinkRequest::kMagic) {
      throw NetworkError("what listens there is no rank of libddp");
    }
    if (reply_.refusal != LinkRefusal::None || reply_.version != LinkRequest::kVersion) {
      const bool is_other_version = reply_.version != LinkRequest::kVersion;
      throw NetworkError(
          fmt::format("it refused the connection: {}",
                      describe_refusal(is_other_version ? LinkRefusal::Version : reply_.refusal,
                                       reply_.version)));
    }
    if (has_proved_) {
      if (prover.is_proof(reply_.bytes, LinkSide::Accepts, request_, nonce_)) return true;
      throw NetworkError(
          "whoever answers does not know this rank's token: another program uses its address");
    }
    nonce_ = reply_.bytes;
    const LinkProof proof = prover.prove(LinkSide::Connects, request_, nonce_);
    // The buffer of a connection that has carried 56 bytes takes it whole.
    const ssize_t sent =
        ::send(socket_.get(), proof.data(), proof.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(proof.size())) {
      drop();
      return false;
    }
    has_proved_ = true;
  }
  return false;
}

}  // namespace libddp
