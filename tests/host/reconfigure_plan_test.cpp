// Handles of a reconfigure as they come from others, and the plan that all members make of them.

#include "libddp/host/reconfigure_plan.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include "libddp/base/error.h"
#include "libddp/base/process.h"
#include "libddp/host/member_watch.h"
#include "libddp/host/reconfigure_arrival.h"
#include "tests/support/catch.h"

using namespace libddp;

namespace {

bool mentions(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

std::string handle_of(const std::string& host_identity, std::uint16_t port = 4711) {
  return MemberHandle::own("10.0.0.7", port, host_identity).encode();
}

std::string text_of_refusal(const ReconfigureRequest& request, const std::string& own) {
  try {
    const ReconfigurePlan plan(request, own);
  } catch (const ArgumentError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a handle says what it was made of", "[reconfigure]") {
  const MemberHandle mine = MemberHandle::own("fd00::2", 65535, "one");
  const MemberHandle read = MemberHandle::decode(mine.encode());
  CHECK(read.instance == mine.instance);
  CHECK(read.address == "fd00::2");
  CHECK(read.port == 65535);
  CHECK(read.pid == ::getpid());
  CHECK(read.begun == process_begin(::getpid()));
  CHECK(read.host_key == mine.host_key);
  CHECK(read.encode() == mine.encode());
  CHECK(MemberHandle::own("fd00::2", 1, "").instance != mine.instance);
}

TEST_CASE("nothing but a handle is read as one", "[reconfigure]") {
  const std::string good = handle_of("");
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK_THROWS_AS(MemberHandle::decode(good.substr(0, size)), ArgumentError);
  }
  CHECK_THROWS_AS(MemberHandle::decode(good + "x"), ArgumentError);
  CHECK_THROWS_AS(MemberHandle::decode(std::string(1 << 20, 'x')), ArgumentError);
  std::mt19937 random(7);
  int num_read = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::string text = good;
    for (int i = 0; i <= trial % 3; ++i) text[random() % text.size()] = static_cast<char>(random());
    try {
      const MemberHandle read = MemberHandle::decode(text);
      ++num_read;  // for example another pid
      CHECK(read.encode().size() <= MemberHandle::kMaxBytes);
      CHECK(read.instance.size() == 32);
    } catch (const ArgumentError&) {
      continue;
    }
  }
  CHECK(num_read > 0);
  CHECK(num_read < 15000);
}

TEST_CASE("all members come to one plan", "[reconfigure]") {
  std::vector<std::string> handles;
  for (int i = 0; i < 6; ++i) handles.push_back(handle_of(i % 2 == 0 ? "even" : "odd"));
  std::vector<std::string> shuffled = handles;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));
  const ReconfigurePlan list({.uuid = -5, .handles = handles}, handles[4]);
  CHECK(list.rank() == 4);
  CHECK(list.world_size() == 6);
  CHECK(list.name() == "reconfigure(uuid=-5)");

  const ReconfigurePlan one({.uuid = 1, .handles = handles, .is_ordered = false}, handles[0]);
  const ReconfigurePlan other({.uuid = 1, .handles = shuffled, .is_ordered = false}, handles[5]);
  CHECK(one.digest() == other.digest());
  CHECK(one.lead().instance == other.lead().instance);
  CHECK(one.lead().instance == list.lead().instance);
  for (std::size_t rank = 0; rank < 6; ++rank) {
    CHECK(one.members()[rank].instance == other.members()[rank].instance);
    CHECK(one.members()[rank].host_key == one.members()[rank < 3 ? 0 : 5].host_key);
  }
  CHECK(one.own().instance == MemberHandle::decode(handles[0]).instance);

  const ReconfigurePlan reordered({.uuid = 1, .handles = shuffled}, handles[0]);
  CHECK(reordered.digest() != list.digest());
  CHECK(reordered.lead().instance == list.lead().instance);
}

TEST_CASE("a plan that cannot be is refused in words", "[reconfigure]") {
  const std::string own = handle_of("");
  const std::string other = handle_of("");
  CHECK(mentions(text_of_refusal({.uuid = 7}, own), "libddp reconfigure(uuid=7): 0 handles"));
  CHECK(mentions(text_of_refusal({.uuid = 7, .handles = {other}}, own),
                 "own handle is not among the 1 given"));
  CHECK(mentions(text_of_refusal({.uuid = 7, .handles = {own, other, other}}, own),
                 "must be unique"));
  CHECK(mentions(text_of_refusal({.uuid = 7, .handles = {own, "\x1b[2J"}}, own),
                 "handles[1]: '\\x1b[2J' is no reconfigure handle"));
  MemberHandle far = MemberHandle::decode(own);
  far.address = "example.org";
  CHECK(mentions(text_of_refusal({.uuid = 7, .handles = {own, far.encode()}}, own),
                 "no numeric address"));
}

TEST_CASE("a process that has ended is seen at once", "[reconfigure]") {
  const std::string own = handle_of("");
  MemberHandle reused = MemberHandle::decode(handle_of(""));
  reused.begun = "1";  // its number is this process's now
  const ReconfigurePlan plan({.uuid = 7, .handles = {own, reused.encode()}}, own);
  try {
    const MemberWatch watch(plan);
    FAIL("not seen");
  } catch (const PeerError& error) {
    CHECK(error.peer_rank() == 1);
    CHECK(mentions(error.what(), "rank 1 (pid "));
    CHECK(mentions(error.what(), "has ended"));
  }
  reused.pid_place = "another machine";
  const ReconfigurePlan elsewhere({.uuid = 8, .handles = {own, reused.encode()}}, own);
  MemberWatch(elsewhere).throw_if_ended();  // nothing is known of it
}

TEST_CASE("arrivals of one round are alike", "[reconfigure]") {
  const std::string own = handle_of("");
  const std::string other = handle_of("");
  const auto arrival = [&](std::int64_t uuid, std::vector<std::string> handles) {
    return ReconfigureArrival::of(ReconfigurePlan({.uuid = uuid, .handles = handles}, own));
  };
  const ReconfigureArrival mine = arrival(-3, {own, other});
  CHECK(ReconfigureArrival::decode(mine.encode()).is_same_round(mine));
  CHECK(mentions(mine.difference(arrival(4, {own, other})), "uuid -3 and uuid 4"));
  CHECK(mentions(mine.difference(arrival(-3, {own})), "2 and 1 handles"));
  CHECK(mentions(mine.difference(arrival(-3, {other, own})), "another order"));
  const std::string text = mine.encode();
  for (std::size_t size = 0; size < text.size(); ++size) {
    CHECK_THROWS_AS(ReconfigureArrival::decode(text.substr(0, size)), StoreError);
  }
}
