// C10dWork: futures, callbacks that use the group, errors that keep their class.

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "libddp/interop/callback_thread.h"
#include "libddp/interop/torch_errors.h"
#include "libddp/interop/work_chain.h"
#include "tests/interop/backend_ranks.h"
#include "tests/interop/tensors.h"
#include "tests/support/catch.h"

using namespace libddp;
using namespace libddp::test;

namespace {

std::atomic<int> num_events_ended{0};

/// A profiler that takes its time, and is there for a scope.
class SlowProfiler {
 public:
  SlowProfiler()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback(nullptr, &end).scopes({at::RecordScope::USER_SCOPE}))) {
    num_events_ended = 0;
  }
  ~SlowProfiler() { at::removeCallback(handle_); }

 private:
  static void end(const at::RecordFunction& event, at::ObserverContext*) {
    if (std::string(event.name()) != "libddp:recvAnySource") return;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ++num_events_ended;
  }

  const at::CallbackHandle handle_;
};

}  // namespace

TEST_CASE("a profiler's event has ended when the waiter goes on", "[c10d]") {
  const SlowProfiler profiler;
  run_backends(2, [](C10dBackend& backend, int rank) {
    for (int i = 0; i < 5; ++i) {
      Tensors tensors = {full_of({200}, rank)};
      if (rank == 0) {
        backend.recvAnysource(tensors, 0)->wait();
        expect(num_events_ended == i + 1, "the event has ended");
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        backend.send(tensors, 0, 0)->wait();
      }
    }
  });
}

TEST_CASE("a future's value is the list of tensors", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {full_of({2}, rank + 1)};
    auto future = backend.allreduce(tensors, {})->getFuture();
    future->wait();
    expect_equal(future->value().toTensorVector().at(0), full_of({2}, 3), "sum");
  });
}

TEST_CASE("a future's callback may use the group and wait", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors first = {full_of({1}, rank)};
    Tensors second = {full_of({1}, rank + 1)};
    auto chained = backend.allreduce(first, {})->getFuture()->then(
        [&](c10::ivalue::Future&) -> c10::IValue {
          backend.allreduce(second, {})->wait();
          return second[0];
        },
        c10::TensorType::get());
    chained->wait();
    expect_equal(chained->value().toTensor(), full_of({1}, 3), "second sum");
  });
}

TEST_CASE("a future's callback may wait for another future, several deep", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int rank) {
    std::vector<Tensors> tensors;
    for (int i = 0; i < 4; ++i) tensors.push_back({full_of({1}, rank + i)});
    const std::function<void(std::size_t)> sum = [&](std::size_t i) {
      if (i == tensors.size()) return;
      auto future = backend.allreduce(tensors[i], {})->getFuture();
      auto deeper = future->then(
          [&, i](c10::ivalue::Future&) -> c10::IValue {
            sum(i + 1);
            return static_cast<std::int64_t>(i);
          },
          c10::IntType::get());
      deeper->wait();
    };
    sum(0);
    for (int i = 0; i < 4; ++i) expect_equal(tensors[i][0], full_of({1}, 1 + 2 * i), "sum");
  });
}

TEST_CASE("callbacks of many futures all run", "[c10d]") {
  run_backends(2, [](C10dBackend& backend, int) {
    std::mutex mutex;
    std::vector<int> order;
    std::vector<Tensors> tensors(20, Tensors{full_of({1}, 1)});
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (int i = 0; i < 20; ++i) {
      tensors[i] = {full_of({1}, 1)};
      futures.push_back(backend.allreduce(tensors[i], {})->getFuture());
      futures.back()->addCallback([&, i](c10::ivalue::Future&) {
        std::lock_guard lock(mutex);
        order.push_back(i);
      });
    }
    for (auto& future : futures) future->wait();
    // A callback that was added after completion ran at once, in this thread.
    std::promise<void> drained;
    CallbackThread::of(backend.group().get())->post([&] { drained.set_value(); });
    drained.get_future().wait();
    expect(order.size() == 20, "all ran");
  });
}

TEST_CASE("an operation's error comes out of wait, exception and future", "[c10d]") {
  run_backends(
      2,
      [](C10dBackend& backend, int rank) {
        if (rank == 1) return;
        c10d::AllreduceOptions options;
        options.timeout = std::chrono::milliseconds(300);
        Tensors tensors = {full_of({2}, 1)};
        auto work = backend.allreduce(tensors, options);
        const std::string text = message_of<c10::DistError>([&] { work->wait(); });
        expect(contains(text, "all_reduce"), "names the operation");
        expect(!work->isSuccess() && work->isCompleted(), "failed");
        expect(work->exception() != nullptr, "has an exception");
        auto future = work->getFuture();
        future->wait();
        expect(future->hasError(), "the future has it too");
        expect(backend.getError() != c10d::ErrorType::SUCCESS, "and the backend");
      },
      std::chrono::seconds(20));
}

TEST_CASE("carriers have c10's class and libddp's exception inside", "[torch_errors]") {
  const auto carried = [](auto error) {
    return error_for_torch(std::make_exception_ptr(std::move(error)));
  };
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(ArgumentError("a"))), c10::Error);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(StateError("s"))), c10::DistError);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(StoreError("s"))), c10::DistStoreError);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(NetworkError("n"))), c10::DistNetworkError);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(TimeoutError("t"))), c10::DistNetworkError);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(PeerError("p", 3))), c10::DistBackendError);
  REQUIRE_THROWS_AS(std::rethrow_exception(carried(std::out_of_range("o"))), std::out_of_range);
  REQUIRE(error_for_torch(nullptr) == nullptr);
  try {
    std::rethrow_exception(carried(PeerError("rank 3 died", 3)));
  } catch (const ErrorCarrier& carrier) {
    REQUIRE_THROWS_AS(std::rethrow_exception(carrier.cause()), PeerError);
  }
}

TEST_CASE("tasks run in order, also those left when the owner goes", "[callbacks]") {
  std::vector<int> order;
  std::promise<void> last;
  {
    CallbackThread callbacks(nullptr, 0);
    for (int i = 0; i < 100; ++i) callbacks.post([&, i] { order.push_back(i); });
    callbacks.post([&] { last.set_value(); });
  }  // its end loses no task and waits for none
  last.get_future().wait();
  REQUIRE(order.size() == 100);
  REQUIRE(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("chained works pass on success, errors and failures of the step", "[work_chain]") {
  auto first = std::make_shared<Work>("first", Tensors{});
  bool ran = false;
  WorkPtr second = after(first, {}, [&] { ran = true; });
  REQUIRE_FALSE(second->is_completed());
  first->finish();
  second->wait();
  REQUIRE(ran);

  auto broken = std::make_shared<Work>("broken", Tensors{});
  WorkPtr never = after(broken, {}, [] { throw std::logic_error("must not run"); });
  broken->finish(std::make_exception_ptr(StateError("broken")));
  REQUIRE_THROWS_AS(never->wait(), StateError);

  WorkPtr fails = after(done("fine", {}), {}, [] { throw StateError("step"); });
  REQUIRE_THROWS_AS(fails->wait(), StateError);
}

TEST_CASE("all_of ends with the last and carries an error", "[work_chain]") {
  auto a = std::make_shared<Work>("a", Tensors{});
  auto b = std::make_shared<Work>("b", Tensors{});
  WorkPtr both = all_of({a, b}, {});
  a->finish(std::make_exception_ptr(StateError("a failed")));
  REQUIRE_FALSE(both->is_completed());
  b->finish();
  REQUIRE(both->is_completed());
  REQUIRE_THROWS_AS(both->wait(), StateError);
}
