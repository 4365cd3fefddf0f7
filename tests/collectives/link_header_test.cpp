#include "libddp/collectives/link_header.h"

#include <sys/socket.h>

#include <cstring>
#include <string>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/collectives/link_stage.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/lone_host.h"

using namespace libddp;
using libddp::test::message_of;

namespace {

CommCall headed_call() {
  CommCall call;
  call.sequence = 7;
  call.description.kind = OpKind::AllReduce;
  call.description.dtype = Dtype::Float32;
  call.description.count = 4;
  return call;
}

std::string header_bytes(const LinkHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

bool is_header(const std::string& bytes) {
  return LinkHeader::read(reinterpret_cast<const std::byte*>(bytes.data())).has_value();
}

// What an all-reduce of four floats says when the other host sends `bytes`.
std::string failure_after(const std::string& bytes) {
  const auto local = test::lone_host();
  std::vector<LinkPeer> peers(1);
  peers[0].host = 1;
  peers[0].rank = 1;
  peers[0].pid = 11;
  peers[0].host_name = "there";
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
  peers[0].give.emplace_back(ends[0]);
  const UniqueFd theirs(ends[1]);
  REQUIRE(::send(theirs.get(), bytes.data(), bytes.size(), 0) ==
          static_cast<ssize_t>(bytes.size()));
  LinkStage stage(*local, 0, std::move(peers));
  const CommCall call = headed_call();
  std::vector<float> floats(4);
  return message_of<PeerError>([&] {
    stage.begin(call);
    stage.all_reduce(reinterpret_cast<std::byte*>(floats.data()), 4,
                     {Dtype::Float32, ReduceOp::Sum, 1.0}, 2);
  });
}

}  // namespace

TEST_CASE("A header says which call it is") {
  const LinkHeader header = LinkHeader::of(headed_call(), 16);
  const std::string bytes = header_bytes(header);
  const auto read = LinkHeader::read(reinterpret_cast<const std::byte*>(bytes.data()));
  REQUIRE(read.has_value());
  CHECK(read->num_bytes == 16);
  CHECK(read->fingerprint == header.fingerprint);
  CHECK(read->call_text() == "all_reduce #7 float32 [4] SUM");
}

TEST_CASE("A header of nothing that there is is none") {
  const LinkHeader right = LinkHeader::of(headed_call(), 16);
  CHECK(is_header(header_bytes(right)));
  const auto refused = [&](auto change) {
    LinkHeader header = right;
    change(header);
    // Of its own description: only what is in that is wrong.
    header.fingerprint = header.description.fingerprint(header.sequence);
    return !is_header(header_bytes(header));
  };
  CHECK(refused([](LinkHeader& header) { header.magic += 1; }));
  CHECK(refused([](LinkHeader& h) { h.description.kind = static_cast<OpKind>(11); }));
  CHECK(refused([](LinkHeader& h) { h.description.dtype = static_cast<Dtype>(200); }));
  CHECK(refused([](LinkHeader& h) { h.description.reduce_op = static_cast<ReduceOp>(8); }));
  CHECK(refused([](LinkHeader& h) { h.description.num_dims = -1; }));
  LinkHeader other = right;
  other.sequence += 1;
  CHECK_FALSE(is_header(header_bytes(other)));
}

TEST_CASE("What another host sends in place of a collective is told as its failure") {
  const CommCall call = headed_call();
  const std::string floats(16, '\0');
  const std::string garbage = failure_after(std::string(sizeof(LinkHeader), 'x') + floats);
  CHECK(garbage.find("rank 1 (pid 11 on there) sent bytes that begin no collective") !=
        std::string::npos);
  const std::string longer = failure_after(header_bytes(LinkHeader::of(call, 20)) + floats);
  CHECK(longer.find("sent 20 bytes for all_reduce #7 float32 [4] SUM, where 16 are due") !=
        std::string::npos);
  // A dtype that there is not must not end in this rank's own words about a defect.
  LinkHeader odd = LinkHeader::of(call, 16);
  odd.description.dtype = static_cast<Dtype>(77);
  odd.fingerprint = odd.description.fingerprint(odd.sequence);
  CHECK(failure_after(header_bytes(odd) + floats).find("begin no collective") != std::string::npos);
}
