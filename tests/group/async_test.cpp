// Asynchronous operations, several groups at a time, and the life of a group.

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <chrono>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("two hundred collectives in flight end in order", "[async]") {
  run_group(3, [](ProcessGroup& group) {
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    std::vector<int> order;
    for (int i = 0; i < 200; ++i) {
      tensors.push_back(filled(i + group.rank(), 1 + i * 37));
      works.push_back(group.all_reduce(tensors.back(), {}, {.async = true}));
      works.back()->on_complete([&order, i](Work&) { order.push_back(i); });
    }
    // A synchronous call queues behind them.
    at::Tensor last = filled(1);
    group.all_reduce(last);
    expect(first(last) == 3, "synchronous");
    expect(group.sequence_number() == 201, "numbers");
    for (int i = 0; i < 200; ++i) {
      const auto index = static_cast<std::size_t>(i);
      expect(works[index]->is_completed(), "done before the synchronous one");
      works[index]->wait();
      expect(first(tensors[index]) == 3 * i + 3, "sum " + std::to_string(i));
      expect(order.at(index) == i, "order");
      expect(works[index]->result().at(0).is_same(tensors[index]), "result");
    }
  });
}

TEST_CASE("the work tells what it is", "[async]") {
  run_group(1, [](ProcessGroup& group) {
    const WorkPtr sync = group.all_reduce(filled(1), {}, {.label = "bucket 3"});
    expect(sync->is_completed() && sync->exception() == nullptr, "done");
    expect(contains(sync->description(), "all_reduce #1 float32 [8]"), sync->description());
    expect(contains(sync->description(), "bucket 3"), sync->description());
    bool was_called = false;
    sync->on_complete([&](Work&) { was_called = true; });
    expect(was_called, "callback of a finished work runs at once");
  });
}

TEST_CASE("the inputs of an asynchronous operation are kept alive", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor output = at::zeros({2, 100000});
    WorkPtr work;
    {
      at::Tensor input = filled(group.rank() + 1, 100000);
      work = group.all_gather_into(output, input, {.async = true});
    }
    work->wait();
    expect(output.sum().item<float>() == 300000.0f, "sum");
  });
}

TEST_CASE("a wait may end before the operation", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    if (group.rank() == 0) {
      const WorkPtr work = group.all_reduce(tensor, {}, {.async = true});
      const std::string text =
          message_of<TimeoutError>([&] { work->wait(std::chrono::milliseconds(20)); });
      expect(contains(text, "all_reduce #1 float32 [8]"), text);
      group.send(filled(0), 1);  // only now the other rank comes
      work->wait();
    } else {
      group.recv(tensor, 0);
      group.all_reduce(tensor.fill_(1));
    }
    expect(first(tensor) == 2, "it went on");
  });
}

TEST_CASE("threads share a group", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    std::atomic<int> total{0};
    run_ranks(4, [&](int) {
      for (int i = 0; i < 50; ++i) {
        at::Tensor tensor = filled(1);
        group.all_reduce(tensor);
        total += static_cast<int>(first(tensor));
      }
    });
    expect(total == 4 * 50 * 2, "all sums");
  });
}

TEST_CASE("groups run side by side on threads of their own", "[async]") {
  run_group(4, [](ProcessGroup& group) {
    const Group even_odd = group.split(
        group.rank() % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{3, 1}, "half");
    const Group all = group.split({3, 2, 1, 0}, "reversed");
    expect(all->rank() == 3 - group.rank(), "order of ranks");
    expect(all->global_ranks() == std::vector<int>{3, 2, 1, 0}, "global ranks");
    std::vector<Group> groups{even_odd, all};
    run_ranks(2, [&](int thread) {
      ProcessGroup& mine = *groups[static_cast<std::size_t>(thread)];
      for (int i = 0; i < 100; ++i) {
        at::Tensor tensor = filled(group.rank(), 100);
        mine.all_reduce(tensor);
        const double expected = thread == 1 ? 6 : group.rank() % 2 == 0 ? 2 : 4;
        expect(first(tensor) == expected, "sum of the sub-group");
      }
    });
    for (const Group& sub : groups) sub->shutdown();
  });
}

TEST_CASE("only members get a sub-group", "[async]") {
  run_group(3, [](ProcessGroup& group) {
    const Group pair = group.split({2, 1}, "pair");
    expect((pair == nullptr) == (group.rank() == 0), "rank 0 is not in it");
    if (!pair) return;
    const Group one = pair->split({pair->rank()}, "one");
    expect(one->global_ranks() == std::vector<int>{group.rank()}, "global rank");
    at::Tensor tensor = filled(group.rank());
    pair->all_reduce(tensor);
    expect(first(tensor) == 3, "pair");
    one->shutdown();
    pair->shutdown();
  });
}

TEST_CASE("a group can be made again over the same store", "[async]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank) {
    for (int round = 0; round < 5; ++round) {
      const Group group = ProcessGroup::create(
          store, {.rank = rank, .world_size = 3, .timeout = std::chrono::seconds(60)});
      at::Tensor tensor = filled(round);
      group->all_reduce(tensor);
      expect(first(tensor) == 3 * round, "sum");
      group->shutdown();
    }
  });
  REQUIRE(store->getNumKeys() == 0);
}

TEST_CASE("a callback may drop the last reference to the group", "[async]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    Group group = ProcessGroup::create(
        store, {.rank = rank, .world_size = 2, .timeout = std::chrono::seconds(60)});
    std::atomic<bool> is_dropped{false};
    at::Tensor tensor = filled(1);
    WorkPtr work = group->all_reduce(tensor, {}, {.async = true});
    // Both ranks are through before either drops the group.
    work->wait();
    group->barrier();
    work = group->all_reduce(tensor, {}, {.async = true});
    work->on_complete([holder = std::move(group), &is_dropped](Work&) mutable {
      holder.reset();
      is_dropped = true;
    });
    while (!is_dropped) std::this_thread::yield();
  });
}

TEST_CASE("shutdown waits for what is in flight", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> tensors;
    const int other = 1 - group.rank();
    for (int i = 0; i < 30; ++i) {
      tensors.push_back(filled(1, 5000));
      works.push_back(group.all_reduce(tensors.back(), {}, {.async = true}));
      tensors.push_back(filled(i));
      works.push_back(group.send(tensors.back(), other, i, {.async = true}));
      tensors.push_back(filled(0));
      works.push_back(group.recv(tensors.back(), other, i, {.async = true}));
    }
    group.shutdown();
    for (const WorkPtr& work : works) {
      expect(work->is_completed(), "done");
      work->wait();
    }
  });
}

TEST_CASE("shutdown waits until what a message has brought is in its place", "[async]") {
  // It is copied into place after it has come, which takes its time: a shutdown falls into that.
  for (const int delay_ms : {20, 50, 80, 110}) {
    run_group(2, [&](ProcessGroup& group) {
      at::Tensor sent = at::ones({4000, 4000});
      at::Tensor received = at::zeros({4000, 4000}).t();
      const WorkPtr work = group.rank() == 0 ? group.send(sent, 1, 0, {.async = true})
                                             : group.recv(received, 0, 0, {.async = true});
      if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
      group.shutdown();
      expect(work->is_completed(), "done");
      if (group.rank() == 1) expect(received.eq(1).all().item<bool>(), "all of it");
    });
  }
}

/// Keeps the queue busy for some milliseconds, so that what is queued next is not done at once.
std::vector<WorkPtr> keep_busy(ProcessGroup& group) {
  std::vector<WorkPtr> works;
  for (int i = 0; i < 8; ++i) {
    works.push_back(group.all_reduce(filled(1, 1 << 20), {}, {.async = true}));
  }
  return works;
}

TEST_CASE("a callback may use its own group", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor own = filled(1), behind = filled(10), inside = filled(100), last = filled(0);
    std::atomic<int> num_done{0};
    const auto ahead = keep_busy(group);
    const WorkPtr work = group.all_reduce(own, {}, {.async = true});
    const WorkPtr second = group.all_reduce(behind, {}, {.async = true});
    second->on_complete([&](Work&) {
      group.barrier();  // while the callback of the first one waits
      ++num_done;
    });
    work->on_complete([&](Work&) {
      second->wait();  // queued behind this one
      ++num_done;
      group.all_reduce(inside);
      ++num_done;
    });
    wait_until([&] { return num_done == 3; });
    expect(first(own) == 2 && first(behind) == 20 && first(inside) == 200, "sums");
    group.all_reduce(last);
    expect(group.sequence_number() == ahead.size() + 5, "numbers");
  });
}

TEST_CASE("a callback may wait for messages and shut the group down", "[async]") {
  run_group(2, [](ProcessGroup& group) {
    at::Tensor tensor = filled(1), message = filled(group.rank());
    std::atomic<bool> is_over{false};
    const auto ahead = keep_busy(group);
    const WorkPtr work = group.all_reduce(tensor, {}, {.async = true});
    work->on_complete([&](Work&) {
      if (group.rank() == 0) {
        group.send(message, 1);
      } else {
        group.recv(message, 0);
      }
      group.shutdown();
      is_over = true;
    });
    wait_until([&] { return is_over.load(); });
    expect(first(message) == 0, "message");
  });
}
