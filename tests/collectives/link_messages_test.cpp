// What a rank of another host may not say on the connection for messages. What it may is tested in
// hierarchical_comm_test.cpp.

#include "libddp/collectives/link_messages.h"

#include <sys/socket.h>

#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/collectives/mailbox.h"
#include "libddp/collectives/shm_comm.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/lone_host.h"

using namespace libddp;
using libddp::test::message_of;

namespace {

// A frame's head as it travels.
struct SentHead {
  enum Kind : std::uint32_t { Envelope, Grant, Done, Data };

  std::uint32_t magic = 0x6c646d31;
  Kind kind = Envelope;
  std::int32_t tag = 0;
  std::uint32_t reserved = 0;
  std::uint64_t message = 0;
  std::uint64_t bytes = 0;
};

std::string sent(SentHead::Kind kind, std::uint64_t bytes = 0) {
  SentHead head;
  head.kind = kind;
  head.bytes = bytes;
  return {reinterpret_cast<const char*>(&head), sizeof(head)};
}

// What this rank says about `frames` while it sends or receives one message of `bytes`.
std::string complaint(bool is_send, std::size_t bytes, const std::vector<std::string>& frames) {
  const auto local = test::lone_host();
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  const UniqueFd theirs(ends[1]);
  std::vector<LinkMessagesPeer> peers;
  peers.push_back({1, 11, "there", UniqueFd(ends[0])});
  LinkMessages links(*local, std::move(peers));
  Mailbox mailbox(*local, {&local->messages(), &links});
  std::vector<std::byte> memory(bytes);
  Comm::Transfer transfer;
  transfer.is_send = is_send;
  transfer.peer = 1;
  transfer.data = memory.data();
  transfer.bytes = bytes;
  return message_of<PeerError>([&] {
    mailbox.progress({&transfer});
    for (const std::string& frame : frames) {
      REQUIRE(::send(theirs.get(), frame.data(), frame.size(), 0) > 0);
      mailbox.progress({&transfer});
    }
  });
}

constexpr std::size_t kGranted = LinkMessages::kInlineBytes + 1;

}  // namespace

TEST_CASE("A rank that answers messages as no rank does ends the group, not in a loop") {
  const std::string odd = "it answered a message that it cannot have had, or asked twice";
  using Kind = SentHead::Kind;
  const auto is_odd = [&](std::size_t bytes, const std::vector<std::string>& answers) {
    return complaint(true, bytes, answers).find(odd) != std::string::npos;
  };
  CHECK(is_odd(kGranted, {sent(Kind::Grant), sent(Kind::Grant)}));
  CHECK(is_odd(kGranted, {sent(Kind::Grant) + sent(Kind::Grant)}));
  CHECK(is_odd(kGranted, {sent(Kind::Done)}));
  CHECK(is_odd(8, {sent(Kind::Grant)}));
  CHECK(is_odd(0, {sent(Kind::Grant)}));
}

TEST_CASE("Bytes that nobody asked for, or none at all, are no message") {
  using Kind = SentHead::Kind;
  const auto told = [](const std::vector<std::string>& frames, const char* text) {
    return complaint(false, kGranted, frames).find(text) != std::string::npos;
  };
  const std::string envelope = sent(Kind::Envelope, kGranted);
  CHECK(told({envelope, sent(Kind::Data, 0)}, "bytes that are no message"));
  CHECK(told({envelope, sent(Kind::Data, 1u << 30)}, "bytes that are no message"));
  CHECK(told({envelope, sent(Kind::Data, kGranted + 1)}, "not asked for"));
  CHECK(told({sent(Kind::Data, 8)}, "not asked for"));
  CHECK(told({sent(static_cast<Kind>(4))}, "bytes that are no message"));
  CHECK(told({sent(Kind::Envelope, kGranted + 1)}, "message sizes differ"));
}
