#include "libddp/collectives/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "libddp/base/check.h"

namespace libddp {

Mailbox::Mailbox(Comm& comm, std::vector<MessageTransport*> transports)
    : comm_(comm), transports_(std::move(transports)) {}

bool Mailbox::progress(const std::vector<Transfer*>& transfers) {
  transfers_ = &transfers;
  for (MessageTransport* transport : transports_) transport->forget_missing(*this);
  bool moved = false;
  while (run_round()) moved = true;
  if (moved) return true;
  for (MessageTransport* transport : transports_) transport->check(transfers);
  return false;
}

bool Mailbox::run_round() {
  bool moved = false;
  for (MessageTransport* transport : transports_) moved |= transport->read(*this);
  moved |= match();
  moved |= post();
  for (MessageTransport* transport : transports_) moved |= transport->write();
  return moved;
}

// Unexpected messages in the order in which they came, each to the first receive that asks for it.
bool Mailbox::match() {
  bool moved = false;
  for (auto message = unexpected_.begin(); message != unexpected_.end();) {
    Transfer* const receive = find_receive(*message);
    if (receive == nullptr) {
      ++message;
      continue;
    }
    check_size(*receive, *message);
    receive->is_started = true;
    receive->source = message->source;
    receive->message = message->number;
    transport_to(message->source).accept(*receive, *message);
    message = unexpected_.erase(message);
    moved = true;
  }
  return moved;
}

bool Mailbox::post() {
  bool moved = false;
  for (MessageTransport* transport : transports_) transport->begin_posting();
  for (Transfer* transfer : *transfers_) {
    if (!transfer->is_send || transfer->is_started) continue;
    if (!transport_to(transfer->peer).post(*transfer)) continue;
    transfer->is_started = true;
    moved = true;
  }
  return moved;
}

MessageTransport& Mailbox::transport_to(int rank) const {
  const auto found =
      std::find_if(transports_.begin(), transports_.end(),
                   [rank](const MessageTransport* transport) { return transport->reaches(rank); });
  LIBDDP_CHECK(found != transports_.end(), "no transport reaches this rank");
  return **found;
}

bool Mailbox::knows(const Transfer* transfer) const {
  return std::find(transfers_->begin(), transfers_->end(), transfer) != transfers_->end();
}

Comm::Transfer* Mailbox::find_send(int peer, std::uint64_t number) const {
  const auto found =
      std::find_if(transfers_->begin(), transfers_->end(), [&](const Transfer* transfer) {
        return transfer->is_send && transfer->is_started && transfer->peer == peer &&
               transfer->message == number;
      });
  return found == transfers_->end() ? nullptr : *found;
}

Comm::Transfer* Mailbox::find_receive(const UnexpectedMessage& message) const {
  const auto found =
      std::find_if(transfers_->begin(), transfers_->end(), [&](const Transfer* transfer) {
        return !transfer->is_send && !transfer->is_started && transfer->tag == message.tag &&
               (transfer->peer < 0 || transfer->peer == message.source);
      });
  return found == transfers_->end() ? nullptr : *found;
}

// Nobody is named as the peer: who is right is not known here.
void Mailbox::check_size(const Transfer& receive, const UnexpectedMessage& message) {
  if (receive.bytes == message.bytes) return;
  // Blocks of a collective have tags below 0, which no user can choose.
  const bool is_block = message.tag < 0;
  const std::string with_tag = is_block ? "" : fmt::format(" with tag {}", message.tag);
  const char* hint =
      is_block
          ? "in all_to_all_single the receiver's output_splits[sender] must equal the sender's "
            "input_splits[receiver], and the rows be alike; in every collective a rank must "
            "receive as much as is sent to it"
          : "tensors of a send and its recv must have equal numbers of bytes";
  comm_.fail({.kind = GroupFailure::Kind::Peer,
              .message = fmt::format(
                  "{} sizes differ: rank {} expects {} bytes{} from rank {}, which sends {} bytes. "
                  "Hint: {}",
                  is_block ? "block" : "message", comm_.rank(), receive.bytes, with_tag,
                  message.source, message.bytes, hint)});
  comm_.throw_if_failed();
}

}  // namespace libddp
