#include "libddp/bootstrap/peer_info.h"

#include <string>

#include "libddp/base/error.h"
#include "libddp/bootstrap/bootstrap_failure.h"
#include "libddp/bootstrap/bootstrap_session.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/link_address.h"
#include "libddp/bootstrap/local_request.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

PeerInfo make_info(int rank) {
  PeerInfo info;
  info.rank = rank;
  info.world_size = 2;
  info.pid = 100 + rank;
  info.host = rank == 0 ? "alpha" : "beta";
  info.boot_id = "boot";
  info.network_namespace = "net:[1]";
  info.pid_namespace = "pid:[2]";
  info.socket_name = "libddp-1";
  info.token = "secret";
  info.agreement = "layout 1";
  info.note = "a note\nwith two lines, a \\ and \\n";
  return info;
}

}  // namespace

TEST_CASE("A description survives the store") {
  const PeerInfo info = make_info(1);
  const PeerInfo copy = PeerInfo::decode(info.encode());
  REQUIRE(copy.encode() == info.encode());
  REQUIRE(copy.rank == 1);
  REQUIRE(copy.pid == 101);
  REQUIRE(copy.pid_namespace == "pid:[2]");
  REQUIRE(copy.token == "secret");
  REQUIRE(copy.note == info.note);
  REQUIRE(copy.who() == "rank 1 (pid 101)");
  PeerInfo empty;
  REQUIRE(PeerInfo::decode(empty.encode()).note.empty());
}

TEST_CASE("Text that is no description is a StoreError") {
  const std::string good = make_info(0).encode();
  for (const std::string& text : {std::string(), std::string("request"), good + " 4:more",
                                  good.substr(0, good.rfind(' ')), "x" + good}) {
    REQUIRE(contains(message_of<StoreError>([&] { PeerInfo::decode(text); }),
                     "no description of a rank"));
  }
}

TEST_CASE("What a stranger wrote into the store cannot reach the terminal") {
  const std::string evil = "\x1b[2J\r\nlibddp: all is well\a\xff";
  const auto is_harmless = [](const std::string& text) {
    return contains(text, "\\x1b[2J\\x0d") && text.find('\x1b') == std::string::npos &&
           text.find('\a') == std::string::npos && text.find('\n') == std::string::npos &&
           text.find('\xff') == std::string::npos;
  };
  CHECK(is_harmless(message_of<StoreError>([&] { PeerInfo::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { decode_failure(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { LinkAddress::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { JoinEntry::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { LocalRequest::decode(evil); })));
  const GroupFailure failure{GroupFailure::Kind::Peer, evil, 1, 4711};
  CHECK(is_harmless(decode_failure(encode_failure(failure)).message));
  PeerInfo info = make_info(1);
  info.agreement = info.host = evil;
  info = PeerInfo::decode(info.encode());
  CHECK(is_harmless(info.host));
  CHECK(is_harmless(find_disagreement(make_info(0), info)->message));
  InMemoryStore store;
  store.set("count", evil);
  CHECK(is_harmless(message_of<StoreError>([&] { store.add("count", 1); })));
}

TEST_CASE("A description of another version names both") {
  const std::string message =
      message_of<StoreError>([] { PeerInfo::decode("libddp-peer-9\nwhat\never\ncomes\nthen"); });
  REQUIRE(contains(message, "a rank runs another version ('libddp-peer-9'), this one libddp "));
  REQUIRE(contains(message, "('libddp-peer-2'). Hint: "));
}

TEST_CASE("A description of a megabyte is none") {
  PeerInfo info = make_info(0);
  info.note = std::string(1u << 20, 'x');
  REQUIRE_THROWS_AS(PeerInfo::decode(info.encode()), StoreError);
}

TEST_CASE("Descriptions that fit do not disagree") {
  REQUIRE_FALSE(find_disagreement(make_info(0), make_info(1)));
}

TEST_CASE("Disagreements name both sides, in the same words from either") {
  const PeerInfo low = make_info(0);
  PeerInfo high = make_info(1);
  const GroupFailure::Kind kind = GroupFailure::Kind::Peer;
  std::string expected;
  SECTION("world size") {
    high.world_size = 3;
    expected = "rank 0 (pid 100) has world size 2, rank 1 (pid 101) has world size 3";
  }
  SECTION("agreement") {
    high.agreement = "layout 2";
    expected = "rank 0 (pid 100) has 'layout 1', rank 1 (pid 101) has 'layout 2'";
  }
  const auto one = find_disagreement(low, high);
  const auto other = find_disagreement(high, low);
  REQUIRE(one);
  REQUIRE(other);
  REQUIRE(contains(one->message, expected));
  REQUIRE(contains(one->message, "Hint: "));
  REQUIRE(one->kind == kind);
  REQUIRE(other->message == one->message);
}

TEST_CASE("The first failure in the store counts") {
  InMemoryStore store;
  REQUIRE_FALSE(find_failure(store));
  const GroupFailure first{GroupFailure::Kind::Network, "two words\nand a line", 3, 77};
  const std::string told = "two words\\nand a line";
  REQUIRE(publish_failure(store, first).message == told);
  const GroupFailure second = publish_failure(store, {GroupFailure::Kind::Peer, "later", 1, 5});
  REQUIRE(second.message == told);
  REQUIRE(second.peer_rank == 3);
  REQUIRE(second.peer_pid == 77);
  REQUIRE(second.kind == GroupFailure::Kind::Network);
  REQUIRE(find_failure(store)->message == told);
  REQUIRE_THROWS_AS(decode_failure("nonsense"), StoreError);
  REQUIRE_THROWS_AS(decode_failure("libddp-failure-1 0.1.0 1:9 1:1 1:1 1:x"), StoreError);
}

TEST_CASE("A failure is thrown with its type, place and culprit") {
  using Kind = GroupFailure::Kind;
  REQUIRE(message_of<TimeoutError>([] {
            throw_failure({Kind::Timeout, "late", -1, 0}, "here: late");
          }) == "here: late");
  REQUIRE(message_of<NetworkError>([] {
            throw_failure({Kind::Network, "far", 1, 2}, "here: far");
          }) == "here: far");
  try {
    throw_failure({Kind::Peer, "gone", 4, 55}, "here: gone");
  } catch (const PeerError& error) {
    REQUIRE(std::string(error.what()) == "here: gone");
    REQUIRE(error.peer_rank() == 4);
    REQUIRE(error.peer_pid() == 55);
  }
}

TEST_CASE("Descriptions of one host have one key") {
  const PeerInfo low = make_info(0);
  PeerInfo high = make_info(1);
  REQUIRE(low.host_key() == high.host_key());
  SECTION("another machine") { high.boot_id = "other"; }
  SECTION("another network namespace") { high.network_namespace = "net:[9]"; }
  if (high.boot_id != low.boot_id || high.network_namespace != low.network_namespace) {
    REQUIRE(low.host_key() != high.host_key());
  }
}
