// What wrapping and the first step leave behind in the arena: nothing beyond the buckets.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

#include "libddp/base/files.h"
#include "libddp/ddp/gradient_buckets.h"
#include "libddp/ddp/reducer.h"
#include "libddp/ddp/replicated_model.h"
#include "tests/ddp/with_groups.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"

namespace libddp {
namespace {

using test::expect;
using test::with_groups;

constexpr std::int64_t kMiBNumel = (1 << 20) / sizeof(float);

/// Bytes that the arenas of all ranks (threads of this process) hold.
std::size_t resident_arena_bytes() {
  std::set<ino_t> seen;
  std::size_t bytes = 0;
  std::vector<std::string> numbers;
  list_names("/proc/self/fd", numbers);
  for (const std::string& number : numbers) {
    const std::string path = "/proc/self/fd/" + number;
    std::string target(PATH_MAX, '\0');
    if (::readlink(path.c_str(), target.data(), target.size()) < 0) continue;  // gone
    if (target.find("memfd:libddp-arena") == std::string::npos) continue;
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0 || !seen.insert(status.st_ino).second) continue;
    bytes += static_cast<std::size_t>(status.st_blocks) * 512;
  }
  return bytes;
}

/// Sizes whose buckets change with the order: 1, 7, 2, 6, 3 MiB and so on.
NamedTensors large_parameters() {
  NamedTensors parameters;
  for (const int mib : {1, 7, 2, 6, 3, 5, 4}) {
    parameters.push_back(
        {fmt::format("p{}", mib), at::full({mib * kMiBNumel}, 1.0).set_requires_grad(true)});
  }
  return parameters;
}

std::size_t bucket_bytes(const Reducer& reducer) {
  std::size_t bytes = 0;
  for (std::size_t bucket = 0; bucket < reducer.num_buckets(); ++bucket) {
    bytes += reducer.buckets().flat(bucket).nbytes();
  }
  return bytes;
}

void train_once(ReplicatedModel& replica, const NamedTensors& parameters) {
  at::Tensor loss = at::zeros({});
  // Autograd goes from the last one to the first: buckets are made anew after the first pass.
  for (std::size_t i = parameters.size(); i-- > 0;) loss = loss + parameters[i].tensor.sum();
  replica.before_forward();
  replica.after_forward({loss}, true);
  loss.backward();
}

TEST_CASE("wrapping and the first step leave nothing in the arena but buckets", "[replica]") {
  with_groups(2, [](const Group& group) {
    const NamedTensors parameters = large_parameters();
    ReplicatedModel replica(parameters, {}, group,
                            {.cap_bytes = 8u << 20, .first_bytes = 1u << 20});
    const auto expect_tight = [&](const char* when) {
      group->barrier();
      const std::size_t limit = 2 * bucket_bytes(replica.reducer()) + (4u << 20);
      const std::size_t held = resident_arena_bytes();
      expect(held <= limit, fmt::format("{}: {} of {}", when, held, limit));
      group->barrier();
    };
    expect_tight("wrapped");
    const BucketPlan first = replica.reducer().buckets().plan();
    for (int i = 0; i < 2; ++i) train_once(replica, parameters);
    expect(replica.reducer().buckets().plan() != first, "the buckets have changed");
    expect_tight("after two steps");
    // Steps of a steady state take no pages and give none back.
    const std::size_t before = resident_arena_bytes();
    group->barrier();
    train_once(replica, parameters);
    expect(parameters[3].tensor.grad().eq(3.0).all().item<bool>(), "averages, added up");
    group->barrier();
    expect(resident_arena_bytes() <= before, "nothing new");
    group->barrier();
  });
}

}  // namespace
}  // namespace libddp
