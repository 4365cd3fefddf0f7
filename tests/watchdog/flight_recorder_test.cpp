#include "libddp/watchdog/flight_recorder.h"

#include <atomic>
#include <thread>

#include "libddp/watchdog/flight_log_json.h"
#include "tests/support/catch.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;
using State = FlightRecorder::State;

namespace {

OpDescription sum_of(std::uint64_t count) {
  OpDescription operation;
  operation.kind = OpKind::AllReduce;
  operation.dtype = Dtype::Float32;
  operation.count = count;
  operation.num_dims = 1;
  operation.shape[0] = static_cast<std::int64_t>(count);
  return operation;
}

}  // namespace

TEST_CASE("the flight log keeps what an operation goes through", "[flight_log]") {
  FlightRecorder log;
  REQUIRE(log.records().empty());
  const auto queued = log.add(sum_of(8), 41);
  const auto running = log.add_running(sum_of(9), 42);
  log.finish(running, false);
  const auto records = log.records();
  REQUIRE(records.size() == 2);
  REQUIRE(records[0].number == queued);
  REQUIRE(records[0].sequence == 41);
  REQUIRE(records[0].state == State::Queued);
  REQUIRE(records[0].started_ns == 0);
  REQUIRE(records[0].operation.to_string(41) == sum_of(8).to_string(41));
  REQUIRE(records[1].state == State::Failed);
  REQUIRE(records[1].called_ns == records[1].started_ns);
  REQUIRE(records[1].finished_ns >= records[1].started_ns);
  log.start(queued);
  REQUIRE(log.records()[0].device_ns == 0);
  log.finish(queued, true, 17);
  REQUIRE(log.records()[0].device_ns == 17);
  REQUIRE(log.records()[0].state == State::Done);
  REQUIRE(log.records()[0].started_ns > 0);
}

TEST_CASE("the flight log forgets the oldest", "[flight_log]") {
  FlightRecorder log;
  const auto first = log.add(sum_of(1), 1);
  for (std::uint64_t i = 0; i < FlightRecorder::kCapacity; ++i) log.add(sum_of(2), i + 2);
  log.finish(first, true);  // its place is another's now
  const auto records = log.records();
  REQUIRE(records.size() == FlightRecorder::kCapacity);
  REQUIRE(records.front().number == 2);
  REQUIRE(records.back().number == FlightRecorder::kCapacity + 1);
  for (const auto& record : records) REQUIRE(record.state == State::Queued);
}

TEST_CASE("the flight log is read while it is written", "[flight_log]") {
  FlightRecorder log;
  std::atomic<bool> is_over{false};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&] {
      while (!is_over) log.finish(log.add_running(sum_of(7), 7), true);
    });
  }
  for (int round = 0; round < 50; ++round) {
    for (const auto& record : log.records()) {
      if (record.sequence != 7 || record.operation.count != 7) is_over = true;
    }
  }
  REQUIRE_FALSE(is_over.exchange(true));
  for (std::thread& writer : writers) writer.join();
}

TEST_CASE("strings of the flight log are JSON", "[flight_log]") {
  REQUIRE(json_string("a\"b\\c\n") == R"("a\"b\\c\u000a")");
  REQUIRE(json_string("\xc3\xa4") == "\"??\"");
}
