// The acceptor between hosts: who is let in, and what strangers can do to it.

#include "libddp/bootstrap/link_acceptor.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/log.h"
#include "libddp/bootstrap/link_connector.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/soon.h"

using namespace libddp;
using namespace std::chrono_literals;
using libddp::test::contains;
using libddp::test::message_of;
using libddp::test::soon;

namespace {

const LinkPlace kFromRankOne{1, LinkKind::Control, 0};
const LinkPlace kToRankZero{0, LinkKind::Control, 0};

LinkProver prover_of(char letter) {
  return LinkProver(RunKey::from_bytes(std::string(32, letter)), {});
}

/// The acceptor of rank 0, which waits for the control connection of rank 1.
struct AcceptorFixture {
  explicit AcceptorFixture(LinkProver prover = prover_of('k')) {
    set_log_level(LogLevel::Off);
    TcpListener listener = TcpListener::open("127.0.0.1");
    endpoint = listener.endpoint();
    acceptor.emplace(std::move(listener), 0, std::move(prover), [this](const LinkPlace& place) {
      return !admitted && place.rank == 1 && place.kind == LinkKind::Control && place.index == 0;
    });
  }
  ~AcceptorFixture() { set_log_level(LogLevel::Warn); }

  void serve() {
    for (AdmittedLink& each : acceptor->admit()) admitted = std::move(each);
  }
  /// Serves until `is_done`; false after a minute.
  template <typename Call>
  bool serve_until(Call is_done) {
    const Deadline deadline = soon();
    while (!deadline.expired()) {
      serve();
      if (is_done()) return true;
      std::this_thread::sleep_for(1ms);
    }
    return false;
  }
  UniqueFd connect() const { return connect_tcp(endpoint, soon()); }
  /// A connection that has said these bytes.
  UniqueFd say(const void* bytes, std::size_t size) const {
    UniqueFd socket = connect();
    send_bytes(socket.get(), bytes, size, soon());
    return socket;
  }
  /// The first reply to a request.
  LinkReply reply_to(const LinkRequest& request, UniqueFd& socket) {
    socket = say(&request, sizeof(request));
    LinkReply reply;
    REQUIRE(serve_until([&] { return has_bytes(socket.get()); }));
    receive_bytes(socket.get(), &reply, sizeof(reply), soon());
    return reply;
  }
  static bool has_bytes(int socket) {
    char byte = 0;
    const ssize_t got = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got >= 0 || errno == ECONNRESET;
  }
  static bool is_over(int socket) {
    char byte = 0;
    const ssize_t got = ::recv(socket, &byte, 1, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }
  /// Rank 1 comes with `prover`; what its side throws leaves.
  bool join(const LinkProver& prover) {
    LinkConnector connector(kToRankZero, 1, endpoint);
    connector.connect(soon());
    return serve_until([&] {
      if (connector.wants_to_connect()) connector.connect(soon());
      return connector.advance(prover);
    });
  }

  TcpEndpoint endpoint;
  std::optional<LinkAcceptor> acceptor;
  std::optional<AdmittedLink> admitted;
};

}  // namespace

TEST_CASE("An acceptor lets in who proves the key, and proves itself") {
  AcceptorFixture fixture;
  REQUIRE(fixture.join(prover_of('k')));
  REQUIRE(fixture.admitted);
  REQUIRE(fixture.admitted->place.rank == 1);
  REQUIRE(fixture.acceptor->num_pending() == 0);
}

TEST_CASE("A wrong key is refused with its reason") {
  AcceptorFixture fixture;
  const std::string message = message_of<NetworkError>([&] { fixture.join(prover_of('w')); });
  REQUIRE(contains(message, "it refused the connection: it does not accept this rank's proof"));
  REQUIRE_FALSE(fixture.admitted);
}

TEST_CASE("Whoever answers without the key is not believed") {
  // It takes any proof, so the connecting side has to find it out.
  TcpListener listener = TcpListener::open("127.0.0.1");
  LinkConnector connector(kToRankZero, 1, listener.endpoint());
  connector.connect(soon());
  UniqueFd impostor;
  while (!impostor) impostor = listener.accept();
  LinkReply reply;
  for (int i = 0; i < 2; ++i) send_bytes(impostor.get(), &reply, sizeof(reply), Deadline::never());
  const std::string message = message_of<NetworkError>([&] {
    while (!connector.advance(prover_of('k'))) std::this_thread::sleep_for(1ms);
  });
  REQUIRE(contains(message, "does not know this rank's token"));
}

TEST_CASE("A recorded handshake is of no use") {
  AcceptorFixture fixture;
  // The bytes of an honest rank, as a listener on the wire has them.
  UniqueFd honest;
  const LinkRequest request = LinkRequest::make(kToRankZero, 1);
  const LinkReply challenge = fixture.reply_to(request, honest);
  const LinkProof proof = prover_of('k').prove(LinkSide::Connects, request, challenge.bytes);
  // The same bytes on another connection meet another nonce.
  UniqueFd replayed;
  REQUIRE(fixture.reply_to(request, replayed).refusal == LinkRefusal::None);
  send_bytes(replayed.get(), proof.data(), proof.size(), soon());
  REQUIRE(fixture.serve_until([&] { return AcceptorFixture::has_bytes(replayed.get()); }));
  LinkReply answer;
  receive_bytes(replayed.get(), &answer, sizeof(answer), soon());
  REQUIRE(answer.refusal == LinkRefusal::Proof);
  REQUIRE_FALSE(fixture.admitted);
  // The acceptor's own proof is none of the other side's.
  UniqueFd mirrored;
  const LinkReply second = fixture.reply_to(request, mirrored);
  const LinkProof own = prover_of('k').prove(LinkSide::Accepts, request, second.bytes);
  REQUIRE_FALSE(prover_of('k').is_proof(own, LinkSide::Connects, request, second.bytes));
  send_bytes(honest.get(), proof.data(), proof.size(), soon());
  REQUIRE(fixture.serve_until([&] { return fixture.admitted.has_value(); }));
}

TEST_CASE("A proof is good for one connection only") {
  const LinkProver prover = prover_of('k');
  const LinkRequest request = LinkRequest::make(kToRankZero, 1);
  const LinkNonce nonce = new_link_nonce();
  const LinkProof proof = prover.prove(LinkSide::Connects, request, nonce);
  REQUIRE(prover.is_proof(proof, LinkSide::Connects, request, nonce));
  const auto refuses = [&](auto change) {
    LinkRequest other = request;
    change(other);
    return !prover.is_proof(proof, LinkSide::Connects, other, nonce);
  };
  REQUIRE(refuses([](LinkRequest& other) { other.rank = 2; }));
  REQUIRE(refuses([](LinkRequest& other) { other.to_rank = 3; }));
  REQUIRE(refuses([](LinkRequest& other) { other.kind = LinkKind::Messages; }));
  REQUIRE(refuses([](LinkRequest& other) { other.index = 1; }));
  REQUIRE(refuses([](LinkRequest& other) { other.nonce[0] ^= 1; }));
  REQUIRE_FALSE(prover.is_proof(proof, LinkSide::Connects, request, new_link_nonce()));
  REQUIRE_FALSE(prover.is_proof(proof, LinkSide::Accepts, request, nonce));
}

TEST_CASE("Guessed proofs") {
  AcceptorFixture fixture;
  const LinkRequest request = LinkRequest::make(kToRankZero, 1);
  for (int i = 0; i < 300; ++i) {
    UniqueFd socket;
    REQUIRE(fixture.reply_to(request, socket).refusal == LinkRefusal::None);
    const LinkNonce guess = new_link_nonce();
    send_bytes(socket.get(), guess.data(), guess.size(), soon());
  }
  REQUIRE(fixture.serve_until([&] { return fixture.acceptor->num_pending() == 0; }));
  REQUIRE_FALSE(fixture.admitted);
  // Without a connection each, a hundred thousand.
  const LinkProver prover = prover_of('k');
  const LinkNonce nonce = new_link_nonce();
  int num_believed = 0;
  for (int i = 0; i < 100000; ++i) {
    LinkProof guess{};
    std::memcpy(guess.data(), &i, sizeof(i));
    num_believed += prover.is_proof(guess, LinkSide::Connects, request, nonce) ? 1 : 0;
  }
  REQUIRE(num_believed == 0);
}

TEST_CASE("A future version is refused on both sides, and both are named") {
  AcceptorFixture fixture;
  LinkRequest request = LinkRequest::make(kToRankZero, 1);
  request.version = 7;
  UniqueFd socket;
  const LinkReply reply = fixture.reply_to(request, socket);
  REQUIRE(reply.refusal == LinkRefusal::Version);
  REQUIRE(reply.version == LinkRequest::kVersion);
  REQUIRE(AcceptorFixture::is_over(socket.get()));
  REQUIRE(contains(describe_refusal(LinkRefusal::Version, 7),
                   "it speaks version 7 of the handshake, this rank version 2"));
  // Only the prefix: nothing else of a future request is known, not even its size.
  const UniqueFd prefix = fixture.say(&request, LinkRequest::kPrefixBytes);
  REQUIRE(fixture.serve_until([&] { return AcceptorFixture::has_bytes(prefix.get()); }));
}

TEST_CASE("Places that nobody has are refused before any proof") {
  AcceptorFixture fixture;
  for (const LinkPlace& from :
       {LinkPlace{2, LinkKind::Control, 0}, LinkPlace{-1}, LinkPlace{0},
        LinkPlace{1, LinkKind::Control, 1}, LinkPlace{1, static_cast<LinkKind>(9), 0}}) {
    LinkRequest request = LinkRequest::make({0, from.kind, from.index}, from.rank);
    UniqueFd socket;
    REQUIRE(fixture.reply_to(request, socket).refusal == LinkRefusal::Place);
  }
  LinkRequest request = LinkRequest::make({5, LinkKind::Control, 0}, 1);  // meant for another rank
  UniqueFd socket;
  REQUIRE(fixture.reply_to(request, socket).refusal == LinkRefusal::Place);
}

TEST_CASE("Silence and slow drips end within seconds") {
  AcceptorFixture fixture;
  const auto begin = std::chrono::steady_clock::now();
  const UniqueFd silent = fixture.connect();
  const UniqueFd slow = fixture.connect();
  const LinkRequest request = LinkRequest::make(kToRankZero, 1);
  const auto* bytes = reinterpret_cast<const char*>(&request);
  std::size_t num_sent = 0;
  Deadline next = Deadline::after(0ms);
  REQUIRE(fixture.serve_until([&] {
    if (next.expired() && num_sent < sizeof(request)) {
      static_cast<void>(::send(slow.get(), bytes + num_sent++, 1, MSG_NOSIGNAL | MSG_DONTWAIT));
      next = Deadline::after(200ms);
    }
    return num_sent > 5 && fixture.acceptor->num_pending() == 0;
  }));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  REQUIRE(took.count() >= 1.9);
  REQUIRE(num_sent < sizeof(request));
  REQUIRE(AcceptorFixture::is_over(silent.get()));
}

TEST_CASE("A crowd of strangers holds nobody up") {
  AcceptorFixture fixture;
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 400; ++i) {
    crowd.push_back(i % 2 == 0 ? fixture.connect() : fixture.say("GET / HTTP/1.0\r\n\r\n", 18));
  }
  REQUIRE(fixture.join(prover_of('k')));
  REQUIRE(fixture.admitted);
  // The crowd has not had its time yet.
  REQUIRE(fixture.acceptor->num_pending() > 0);
  REQUIRE(fixture.acceptor->num_pending() <= LinkAcceptor::kMostPending);
}

TEST_CASE("Ranks join while a crowd keeps coming") {
  AcceptorFixture fixture;
  std::atomic<bool> is_over{false};
  std::atomic<int> num_visits{0};
  std::thread crowd([&] {
    std::vector<UniqueFd> visitors(1500);
    for (std::size_t i = 0; !is_over; i = (i + 1) % visitors.size()) {
      try {
        visitors[i] = i % 2 == 0 ? fixture.connect() : fixture.say("GET / HTTP/1.0\r\n\r\n", 18);
        ++num_visits;
      } catch (const Error&) {
        // The acceptor's queue is full for a moment, or it has just closed this one.
      }
      std::this_thread::sleep_for(500us);
    }
  });
  std::vector<double> joins;
  bool all_joined = true;
  for (int i = 0; i < 10; ++i) {
    const Deadline next = Deadline::after(100ms);
    while (!next.expired()) fixture.serve();
    fixture.admitted.reset();
    const auto begin = std::chrono::steady_clock::now();
    all_joined = fixture.join(prover_of('k')) && fixture.admitted && all_joined;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    joins.push_back(took.count());
  }
  is_over = true;
  crowd.join();
  std::sort(joins.begin(), joins.end());
  INFO(num_visits << " visits, the slower half of joins " << joins[5] << " s and more");
  REQUIRE(all_joined);
  CHECK(joins[5] < 2);
  REQUIRE(num_visits > 100);
}

TEST_CASE("Who was dropped by a crowd comes again") {
  AcceptorFixture fixture;
  LinkConnector connector(kToRankZero, 1, fixture.endpoint);
  connector.connect(soon());
  // As if a crowd had pushed it out: the acceptor closes it before it is proved.
  ::shutdown(connector.socket(), SHUT_RDWR);
  REQUIRE_FALSE(connector.advance(prover_of('k')));
  REQUIRE(fixture.serve_until([&] {
    if (connector.wants_to_connect()) connector.connect(soon());
    return connector.advance(prover_of('k'));
  }));
  REQUIRE(connector.was_dropped());
  REQUIRE(fixture.admitted);
}

TEST_CASE("An acceptor without descriptors goes on") {
  AcceptorFixture fixture;
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 8; ++i) strangers.push_back(fixture.connect());
  LinkConnector connector(kToRankZero, 1, fixture.endpoint);
  connector.connect(soon());
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int lowest_free = ::dup(0);
  ::close(lowest_free);
  const rlimit tight{static_cast<rlim_t>(lowest_free), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &tight) == 0);
  for (int i = 0; i < 5; ++i) fixture.serve();  // no descriptor at all: nothing happens
  const bool none_taken = fixture.acceptor->num_pending() == 0 && !fixture.admitted;
  const rlimit for_three{static_cast<rlim_t>(lowest_free + 3), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &for_three) == 0);
  const bool is_in = fixture.serve_until([&] { return connector.advance(prover_of('k')); });
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(none_taken);
  REQUIRE(is_in);
  REQUIRE(fixture.admitted);
}

TEST_CASE("Without a key the tokens of the descriptions are the proof") {
  const auto tokens = [](char letter) {
    return LinkProver(
        nullptr, [letter](int rank) { return std::string(31, letter) + std::to_string(rank); });
  };
  {
    AcceptorFixture fixture(tokens('t'));
    REQUIRE(fixture.join(tokens('t')));
  }
  AcceptorFixture fixture(tokens('t'));
  REQUIRE_THROWS_AS(fixture.join(tokens('u')), NetworkError);
  const LinkProver empty(nullptr, [](int) { return std::string(); });
  const LinkRequest request = LinkRequest::make(kToRankZero, 1);
  REQUIRE_FALSE(empty.is_proof({}, LinkSide::Connects, request, {}));
}
