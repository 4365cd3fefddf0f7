#include "libddp/bootstrap/meeting_card.h"

#include <string>

#include "libddp/base/error.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/link_card.h"
#include "libddp/bootstrap/meeting_failure.h"
#include "libddp/bootstrap/meeting_hello.h"
#include "libddp/bootstrap/meeting_session.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::message_of;

namespace {

MeetingCard make_card(int rank) {
  MeetingCard card;
  card.rank = rank;
  card.world_size = 2;
  card.pid = 100 + rank;
  card.host = rank == 0 ? "alpha" : "beta";
  card.boot_id = "boot";
  card.network_namespace = "net:[1]";
  card.pid_namespace = "pid:[2]";
  card.socket_name = "libddp-1";
  card.token = "secret";
  card.agreement = "layout 1";
  card.note = "a note\nwith two lines, a \\ and \\n";
  return card;
}

}  // namespace

TEST_CASE("A card survives the store") {
  const MeetingCard card = make_card(1);
  const MeetingCard copy = MeetingCard::decode(card.encode());
  REQUIRE(copy.encode() == card.encode());
  REQUIRE(copy.rank == 1);
  REQUIRE(copy.pid == 101);
  REQUIRE(copy.pid_namespace == "pid:[2]");
  REQUIRE(copy.token == "secret");
  REQUIRE(copy.note == card.note);
  REQUIRE(copy.who() == "rank 1 (pid 101)");
  MeetingCard empty;
  REQUIRE(MeetingCard::decode(empty.encode()).note.empty());
}

TEST_CASE("Text that is no card is a StoreError") {
  const std::string good = make_card(0).encode();
  for (const std::string& text : {std::string(), std::string("hello"), good + " 4:more",
                                  good.substr(0, good.rfind(' ')), "x" + good}) {
    REQUIRE(
        contains(message_of<StoreError>([&] { MeetingCard::decode(text); }), "no meeting card"));
  }
}

TEST_CASE("What a stranger wrote into the store cannot reach the terminal") {
  const std::string evil = "\x1b[2J\r\nlibddp: all is well\a\xff";
  const auto is_harmless = [](const std::string& text) {
    return contains(text, "\\x1b[2J\\x0d") && text.find('\x1b') == std::string::npos &&
           text.find('\a') == std::string::npos && text.find('\n') == std::string::npos &&
           text.find('\xff') == std::string::npos;
  };
  CHECK(is_harmless(message_of<StoreError>([&] { MeetingCard::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { MeetingFailure::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { LinkCard::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { Hail::decode(evil); })));
  CHECK(is_harmless(message_of<StoreError>([&] { MeetingHello::decode(evil); })));
  const MeetingFailure failure{MeetingFailure::Kind::Peer, 1, 4711, evil};
  CHECK(is_harmless(MeetingFailure::decode(failure.encode()).cause));
  MeetingCard card = make_card(1);
  card.agreement = card.host = evil;
  card = MeetingCard::decode(card.encode());
  CHECK(is_harmless(card.host));
  CHECK(is_harmless(find_disagreement(make_card(0), card)->cause));
  InMemoryStore store;
  store.set("count", evil);
  CHECK(is_harmless(message_of<StoreError>([&] { store.add("count", 1); })));
}

TEST_CASE("A card of another version names both") {
  const std::string message =
      message_of<StoreError>([] { MeetingCard::decode("libddp-card-9\nwhat\never\ncomes\nthen"); });
  REQUIRE(contains(message, "a rank runs another version ('libddp-card-9'), this one libddp "));
  REQUIRE(contains(message, "('libddp-card-2'). Hint: "));
}

TEST_CASE("A card of a megabyte is none") {
  MeetingCard card = make_card(0);
  card.note = std::string(1u << 20, 'x');
  REQUIRE_THROWS_AS(MeetingCard::decode(card.encode()), StoreError);
}

TEST_CASE("Cards that fit do not disagree") {
  REQUIRE_FALSE(find_disagreement(make_card(0), make_card(1)));
}

TEST_CASE("Disagreements name both sides, in the same words from either") {
  const MeetingCard low = make_card(0);
  MeetingCard high = make_card(1);
  const MeetingFailure::Kind kind = MeetingFailure::Kind::Peer;
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
  REQUIRE(contains(one->cause, expected));
  REQUIRE(contains(one->cause, "Hint: "));
  REQUIRE(one->kind == kind);
  REQUIRE(other->cause == one->cause);
}

TEST_CASE("The first failure in the store counts") {
  InMemoryStore store;
  REQUIRE_FALSE(find_failure(store));
  const MeetingFailure first{MeetingFailure::Kind::Network, 3, 77, "two words\nand a line"};
  const std::string told = "two words\\nand a line";
  REQUIRE(publish_failure(store, first).cause == told);
  const MeetingFailure second = publish_failure(store, {MeetingFailure::Kind::Peer, 1, 5, "later"});
  REQUIRE(second.cause == told);
  REQUIRE(second.rank == 3);
  REQUIRE(second.pid == 77);
  REQUIRE(second.kind == MeetingFailure::Kind::Network);
  REQUIRE(find_failure(store)->cause == told);
  REQUIRE_THROWS_AS(MeetingFailure::decode("nonsense"), StoreError);
  REQUIRE_THROWS_AS(MeetingFailure::decode("libddp-failure-1 0.1.0 1:9 1:1 1:1 1:x"), StoreError);
}

TEST_CASE("A failure is thrown with its type, place and culprit") {
  using Kind = MeetingFailure::Kind;
  REQUIRE(message_of<TimeoutError>([] {
            throw_failure("here", {Kind::Timeout, -1, 0, "late"});
          }) == "here: late");
  REQUIRE(message_of<NetworkError>([] {
            throw_failure("here", {Kind::Network, 1, 2, "far"});
          }) == "here: far");
  try {
    throw_failure("here", {Kind::Peer, 4, 55, "gone"});
  } catch (const PeerError& error) {
    REQUIRE(std::string(error.what()) == "here: gone");
    REQUIRE(error.peer_rank() == 4);
    REQUIRE(error.peer_pid() == 55);
  }
}

TEST_CASE("Cards of one host have one key") {
  const MeetingCard low = make_card(0);
  MeetingCard high = make_card(1);
  REQUIRE(low.host_key() == high.host_key());
  SECTION("another machine") { high.boot_id = "other"; }
  SECTION("another network namespace") { high.network_namespace = "net:[9]"; }
  if (high.boot_id != low.boot_id || high.network_namespace != low.network_namespace) {
    REQUIRE(low.host_key() != high.host_key());
  }
}
