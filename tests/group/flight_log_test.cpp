// What a group writes into its flight log.

#include <atomic>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"
#include "tests/support/wait_until.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("a group logs its operations and its failure", "[flight_log]") {
  std::atomic<int> num_read{0};
  run_group(2, [&](ProcessGroup& group) {
    at::Tensor tensor = filled(1);
    group.all_reduce(tensor, {}, {.label = "bucket 0 (\"weights\")"});
    group.all_reduce(tensor, {}, {.async = true})->wait();
    if (group.rank() == 0) {
      group.send(tensor, 1);
    } else {
      group.recv(tensor, 0);
    }
    const std::string log = group.flight_log();
    for (const std::string part :
         {R"("group": "test", "rank": )", R"("failure": null, "operations_total": 3)",
          R"x("call": "all_reduce #1 float32 [8] SUM (bucket 0 (\"weights\"))")x",
          R"("number": 2, "sequence": 2, "kind": "all_reduce")", R"("state": "done")"}) {
      expect(contains(log, part), part + " in: " + log);
    }
    expect(contains(log, group.rank() == 0 ? R"("kind": "send")" : R"("kind": "recv")"), log);
    ++num_read;
    wait_until([&] { return num_read == 2; });
    if (group.rank() == 0) group.abort("enough");
    message_of<Error>([&] { group.barrier(); });
    const std::string after = group.flight_log();
    expect(contains(after, "enough"), after);
    expect(contains(after, R"("state": "failed")"), after);
  });
}
