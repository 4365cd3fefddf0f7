#pragma once

// Point-to-point messages to ranks of other hosts, one connection per rank.
//
// Words as in mailbox.h: *envelope* (tag, size; small payloads inside), *unexpected message* (an
// envelope that nobody has asked for yet), *ack*: "send the bytes" (grant) or "done". Large
// messages leave their sender only after the receiver has granted them, so a receiver keeps no more
// than small payloads of messages that it did not ask for. Thread rule: `progress` from one thread
// at a time; `has_read_all` likewise; network_fd and on_network from any thread; finish from any
// thread once nothing is in flight.
//
//   LinkMail mail(local, std::move(peers));
//   bool moved = mail.progress(transfers);

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/collectives/link_failure.h"
#include "libddp/collectives/shm_comm.h"
#include "libddp/transport/link_health.h"

namespace libddp {

struct LinkMailPeer {
  int rank = 0;
  pid_t pid = 0;
  std::string host_name;
  UniqueFd socket;
};

class LinkMail {
 public:
  using Transfer = Comm::Transfer;
  static constexpr std::uint64_t kInlineBytes = 4096;

  LinkMail(ShmComm& local, std::vector<LinkMailPeer> peers);

  /// As Comm::progress; only for transfers that concern other hosts, or any rank.
  bool progress(const std::vector<Transfer*>& parts);
  void finish() noexcept;
  bool has_read_all(int rank) const;
  int network_fd() const { return poller_.get(); }
  void on_network() noexcept;
  /// As Comm.
  std::optional<CommFailure> look_at_network(std::int64_t now_ns) {
    return network_failure(health_.look(now_ns));
  }

 private:
  enum class FrameKind : std::uint32_t { Envelope, Grant, Done, Data };
  struct FrameHead {
    std::uint32_t magic = 0;
    FrameKind kind = FrameKind::Envelope;
    std::int32_t tag = 0;
    std::uint32_t reserved = 0;
    std::uint64_t message = 0;
    /// Envelope: of the message; Data: that follow.
    std::uint64_t bytes = 0;
  };
  struct UnexpectedMessage {
    std::size_t channel = 0;
    std::uint64_t message = 0;
    std::int32_t tag = 0;
    std::uint64_t bytes = 0;
    std::vector<std::byte> payload;
  };
  /// A receive that ends when its ack has left: when `at` bytes of the queue have.
  struct Ending {
    std::uint64_t at = 0;
    Transfer* part = nullptr;
  };
  struct Channel {
    LinkMailPeer peer;
    // As the source.
    std::uint64_t messages_posted = 0;
    std::vector<std::byte> queue;
    std::size_t queue_sent = 0;
    std::uint64_t queue_sent_ever = 0;
    std::deque<Transfer*> granted;
    /// A chunk of the first granted message that is under way: its head, then its bytes.
    FrameHead chunk_head;
    std::size_t chunk_head_left = 0;
    std::uint64_t chunk_left = 0;
    std::deque<Ending> endings;
    // As the target.
    FrameHead head;
    std::size_t head_bytes = 0;
    std::uint64_t body_bytes = 0;
    std::vector<std::byte> body;
    std::vector<Transfer*> receiving;
    bool is_closed = false;
    /// Why, 0 = the peer closed it.
    int error = 0;
    Deadline closed_patience = Deadline::never();
  };

  void forget_missing_parts();
  bool knows(const Transfer* part) const;
  bool poll_once();
  void post_envelopes();
  bool write(Channel& channel);
  bool write_queue(Channel& channel);
  void begin_chunk(Channel& channel);
  bool write_chunk(Channel& channel);
  void queue_frame(Channel& channel, const FrameHead& head, const void* payload = nullptr,
                   std::size_t bytes = 0);
  bool read(std::size_t index);
  bool read_head(Channel& channel);
  bool read_body(std::size_t index);
  /// Bytes taken; 0 = none now, or the end.
  std::size_t receive(Channel& channel, void* data, std::size_t bytes);
  void take_ack(Channel& channel);
  void queue_ending(Channel& channel, const FrameHead& ack, Transfer& part);
  bool match_unexpected();
  void deliver(Transfer& part, UnexpectedMessage& unexpected);
  void check_closed();
  [[noreturn]] void fail_and_throw(const LinkMailPeer& peer, const std::string& text);

  ShmComm& local_;
  UniqueFd poller_;
  LinkHealth health_;
  std::vector<Channel> channels_;
  std::vector<int> channel_of_;
  std::deque<UnexpectedMessage> unexpected_;
  const std::vector<Transfer*>* parts_ = nullptr;
};

}  // namespace libddp
