// send, recv, exchange: tags, any source, many in flight, none in the way of collectives.

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;
using Direction = Exchange::Direction;

namespace {}  // namespace

TEST_CASE("a ring of blocking sends and receives", "[p2p]") {
  for (const int world_size : {2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      for (const std::int64_t numel : {1, 1000, 2000000}) {
        at::Tensor token = filled(0, numel);
        if (group.rank() == 0) {
          group.send(filled(1, numel), 1);
          group.recv(token, p - 1);
          expect(first(token) == p, "the token went round");
        } else {
          group.recv(token, group.rank() - 1);
          group.send(token.add(1), (group.rank() + 1) % p);
        }
      }
    });
  }
}

TEST_CASE("tags keep messages apart and order within a tag holds", "[p2p]") {
  run_group(2, [](ProcessGroup& group) {
    std::vector<WorkPtr> works;
    if (group.rank() == 0) {
      for (int i = 0; i < 20; ++i) {
        works.push_back(group.send(filled(i), 1, i % 2, {.async = true}));
      }
    } else {
      std::vector<at::Tensor> got(20);
      for (int tag : {1, 0}) {
        for (int i = tag; i < 20; i += 2) {
          got[static_cast<std::size_t>(i)] = filled(-1);
          works.push_back(group.recv(got[static_cast<std::size_t>(i)], 0, tag, {.async = true}));
        }
      }
      for (const WorkPtr& work : works) work->wait();
      for (int i = 0; i < 20; ++i) {
        expect(first(got[static_cast<std::size_t>(i)]) == i, "message " + std::to_string(i));
      }
    }
    for (const WorkPtr& work : works) work->wait();
  });
}

TEST_CASE("a receive from any source tells the source", "[p2p]") {
  run_group(5, [](ProcessGroup& group) {
    if (group.rank() != 0) {
      group.send(filled(group.rank()), 0, 3);
      return;
    }
    int seen = 0;
    for (int i = 1; i < 5; ++i) {
      at::Tensor tensor = filled(-1);
      const WorkPtr work = group.recv(tensor, std::nullopt, 3);
      expect(work->source_rank() == static_cast<int>(first(tensor)), "source");
      seen |= 1 << work->source_rank();
    }
    expect(seen == 0b11110, "each once");
  });
}

TEST_CASE("pending receives block neither collectives nor sends", "[p2p]") {
  run_group(2, [](ProcessGroup& group) {
    const int other = 1 - group.rank();
    at::Tensor late = filled(-1);
    const WorkPtr pending = group.recv(late, other, 7, {.async = true});
    at::Tensor sum = filled(group.rank() + 1);
    group.all_reduce(sum);
    expect(first(sum) == 3, "all_reduce");
    std::vector<at::Tensor> outputs{filled(0), filled(0)};
    group.all_to_all(outputs, {filled(1), filled(2)});
    expect(!pending->is_completed(), "still pending");
    group.barrier();  // the other rank sends only after this look
    group.send(filled(group.rank()), other, 7, {.async = true});
    pending->wait();
    expect(first(late) == other, "received");
  });
}

TEST_CASE("a blocking receive lets another thread send", "[p2p]") {
  // Rank 0 waits in recv for what rank 1 sends only after it has got something from rank 0.
  run_group(2, [](ProcessGroup& group) {
    at::Tensor got = filled(-1);
    if (group.rank() == 1) {
      group.recv(got, 0, 1);
      group.send(got.add(1), 0, 2);
      return;
    }
    run_ranks(2, [&](int thread) {
      if (thread == 0) {
        group.recv(got, 1, 2);
      } else {
        group.send(filled(5), 1, 1);
      }
    });
    expect(first(got) == 6, "answer");
  });
}

TEST_CASE("an exchange runs its parts in any order", "[p2p]") {
  for (const int world_size : {1, 2, 3, 5}) {
    run_group(world_size, [](ProcessGroup& group) {
      const int p = group.size();
      std::vector<Exchange> parts;
      std::vector<at::Tensor> got;
      for (int rank = 0; rank < p; ++rank) {
        got.push_back(at::zeros({2, 50000}).t());
        const at::Tensor mine = filled(group.rank() * 10 + rank, 100000);
        parts.push_back({Direction::Send, mine, rank, 0});
        parts.push_back({Direction::Recv, got.back(), rank, 0});
      }
      if (group.rank() % 2 == 1) std::reverse(parts.begin(), parts.end());
      group.exchange(parts);
      for (int rank = 0; rank < p; ++rank) {
        const at::Tensor& tensor = got[static_cast<std::size_t>(rank)];
        expect(tensor[0][0].item<float>() == rank * 10 + group.rank(), "part");
      }
    });
  }
}

TEST_CASE("two hundred messages are in flight at a time", "[p2p]") {
  run_group(3, [](ProcessGroup& group) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> got;
    for (int i = 0; i < 100; ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == group.rank()) continue;
        got.push_back(filled(-1));
        works.push_back(group.recv(got.back(), rank, i, {.async = true}));
      }
    }
    for (int i = 99; i >= 0; --i) {
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == group.rank()) continue;
        works.push_back(group.send(filled(i * 10 + group.rank()), rank, i, {.async = true}));
      }
    }
    for (const WorkPtr& work : works) work->wait();
    std::size_t next = 0;
    for (int i = 0; i < 100; ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        if (rank != group.rank()) expect(first(got[next++]) == i * 10 + rank, "message");
      }
    }
  });
}

TEST_CASE("sizes that differ are an error on both sides", "[p2p]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = filled(0, group.rank() == 0 ? 4 : 5);
    const std::string text = message_of<Error>([&] {
      if (group.rank() == 0) {
        group.send(tensor, 1);
      } else {
        group.recv(tensor, 0);
      }
    });
    expect(contains(text, "16") && contains(text, "20"), "both sizes: " + text);
  });
}

TEST_CASE("a peer that left is an error for who waits for it only", "[p2p]") {
  run_group(3, [](ProcessGroup& group) {
    if (group.rank() == 2) return;  // leaves in order
    at::Tensor tensor = filled(group.rank());
    const std::string text = message_of<PeerError>([&] { group.recv(tensor, 2); });
    expect(contains(text, "rank 2 (pid ") && contains(text, "has left the group"), text);
    if (group.rank() == 0) {
      group.send(tensor, 1);
    } else {
      group.recv(tensor, 0);
      expect(first(tensor) == 0, "the others go on");
    }
  });
}

// Each would wait for the other one, for the time that the group gives an operation.
TEST_CASE("ranks that leave do not wait for messages that nobody makes", "[p2p]") {
  const auto start = std::chrono::steady_clock::now();
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      const int peer = 1 - group.rank();
      at::Tensor tensor = filled(0);
      const WorkPtr receive = group.recv(tensor, peer, 1, {.async = true});
      at::Tensor any = filled(0);
      const WorkPtr from_any = group.recv(any, std::nullopt, 2, {.async = true});
      group.shutdown();
      for (const WorkPtr& work : {receive, from_any}) {
        const std::string text = message_of<PeerError>([&] { work->wait(); });
        expect(contains(text, "leaves the group") || contains(text, "has left the group"), text);
      }
    });
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      const int peer = 1 - group.rank();
      // Too much to be handed over before the peer takes it.
      const WorkPtr send = group.send(filled(2, 4 << 20), peer, 1, {.async = true});
      group.shutdown();
      const std::string text = message_of<PeerError>([&] { send->wait(); });
      expect(contains(text, "leaves the group") || contains(text, "has left the group"), text);
    });
  }
  // Each has both, so neither can say that it sends, or receives, nothing.
  run_group(2, [](ProcessGroup& group) {
    const int peer = 1 - group.rank();
    at::Tensor tensor = filled(0);
    const WorkPtr receive = group.recv(tensor, peer, 1, {.async = true});
    const WorkPtr send = group.send(filled(2, 4 << 20), peer, 2, {.async = true});
    group.shutdown();
    message_of<PeerError>([&] { receive->wait(); });
    message_of<PeerError>([&] { send->wait(); });
  });
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));
}

TEST_CASE("a rank that leaves still takes what it has asked for", "[p2p]") {
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    run_group_on_hosts(hosts, [](ProcessGroup& group) {
      at::Tensor tensor = filled(0, 4 << 20);
      at::Tensor never = filled(0);
      if (group.rank() == 0) {
        const WorkPtr first_one = group.recv(tensor, 1, 1, {.async = true});
        const WorkPtr second_one = group.recv(never, 1, 1, {.async = true});
        group.shutdown();
        first_one->wait();
        expect(first(tensor) == 7, "what was sent to a rank that leaves");
        message_of<PeerError>([&] { second_one->wait(); });
        return;
      }
      // Rank 0 has said that it sends nothing any more.
      const std::string text = message_of<PeerError>([&] { group.recv(never, 0, 9); });
      expect(contains(text, "rank 0 (pid ") && contains(text, "leaves the group"), text);
      group.send(filled(7, 4 << 20), 0, 1);
    });
  }
}

TEST_CASE("a batch given up because one peer left ends for its other peers", "[p2p]") {
  const auto start = std::chrono::steady_clock::now();
  run_group(3, [](ProcessGroup& group) {
    if (group.rank() == 1) return;  // leaves in order, without its part
    if (group.rank() == 0) {
      at::Tensor from_1 = filled(0);
      at::Tensor from_2 = filled(0);
      const std::string text = message_of<PeerError>([&] {
        group.exchange({{Direction::Recv, from_1, 1, 0}, {Direction::Recv, from_2, 2, 7}});
      });
      expect(contains(text, "rank 1 (pid ") && contains(text, "has left the group"), text);
    } else {
      const std::string text = message_of<PeerError>([&] {
        // Too much to be handed over before rank 0 takes it, under a tag that it does not ask for.
        group.send(filled(2, 4 << 20), 0, 3);
      });
      expect(contains(text, "rank 1 (pid ") && contains(text, "has left the group"), text);
      expect(contains(text, "batch of messages of rank 0 (pid "), text);
    }
  });
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));
}
