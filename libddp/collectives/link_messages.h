#pragma once

// Messages to ranks of other hosts, one connection per rank.
//
// Large messages leave their sender only after the receiver has granted them, so a receiver keeps
// no more than small payloads of messages that it did not ask for. Thread rule: see
// message_transport.h; `has_read_all` as that; network_fd and on_network from any thread; finish
// from any thread once nothing is in flight.
//
//   LinkMessages messages(local, std::move(peers));
//   Mailbox mailbox(comm, {&local.messages(), &messages});

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
#include "libddp/collectives/message_transport.h"
#include "libddp/transport/link_health.h"

namespace libddp {

class ShmComm;

struct LinkMessagesPeer {
  int rank = 0;
  pid_t pid = 0;
  std::string host_name;
  UniqueFd socket;
};

class LinkMessages final : public MessageTransport {
 public:
  static constexpr std::uint64_t kInlineBytes = 4096;

  LinkMessages(ShmComm& local, std::vector<LinkMessagesPeer> peers);

  bool reaches(int rank) const override { return find(rank) != nullptr; }
  void forget_missing(const Mailbox& mailbox) override;
  bool read(Mailbox& mailbox) override;
  void begin_posting() override;
  bool post(Transfer& send) override;
  void accept(Transfer& receive, UnexpectedMessage& message) override;
  bool write() override;
  void check(const std::vector<Transfer*>& transfers) override;

  // As Comm.
  void finish() noexcept;
  bool has_read_all(int rank) const;
  int network_fd() const { return poller_.get(); }
  void on_network() noexcept;
  std::optional<GroupFailure> look_at_network(std::int64_t now_ns) {
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
  /// A receive that ends when its ack has left: when `at` bytes of the queue have.
  struct Ending {
    std::uint64_t at = 0;
    Transfer* receive = nullptr;
  };
  struct Channel {
    LinkMessagesPeer peer;
    // As the source.
    std::uint64_t messages_posted = 0;
    bool is_full = false;
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

  const Channel* find(int rank) const;
  Channel& channel_to(int rank) {
    return channels_[static_cast<std::size_t>(channel_of_[static_cast<std::size_t>(rank)])];
  }
  static bool is_queue_full(const Channel& channel);
  static void queue_frame(Channel& channel, const FrameHead& head, const void* payload = nullptr,
                          std::size_t bytes = 0);
  static void queue_ending(Channel& channel, const FrameHead& ack, Transfer& receive);
  static bool write(Channel& channel);
  static bool write_queue(Channel& channel);
  static void begin_chunk(Channel& channel);
  static bool write_chunk(Channel& channel);
  bool read(Channel& channel, Mailbox& mailbox);
  bool read_head(Channel& channel);
  bool read_body(Channel& channel, Mailbox& mailbox);
  bool read_data(Channel& channel);
  /// Bytes taken; 0 = none now, or the end.
  static std::size_t receive(Channel& channel, void* data, std::size_t bytes);
  void take_ack(Channel& channel, const Mailbox& mailbox);
  [[noreturn]] void fail_and_throw(const LinkMessagesPeer& peer, const std::string& text);

  ShmComm& local_;
  UniqueFd poller_;
  LinkHealth health_;
  std::vector<Channel> channels_;
  /// By rank of the group; -1 = none.
  std::vector<int> channel_of_;
};

}  // namespace libddp
