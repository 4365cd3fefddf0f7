// Counts and offsets beyond 2^31, which an int somewhere on the way would cut off.

#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "tests/support/catch.h"
#include "tests/support/torch_group_fixture.h"

using namespace libddp;
using namespace libddp::test;

namespace {

constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 64;
constexpr int kWorldSize = 2;
/// Elements at the ends, at the edge of int, and around the middle, where the slices meet.
constexpr std::array<std::int64_t, 6> kMarks = {
    0, kCount / 2 - 1, kCount / 2, (std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, kCount - 1};

/// Zeros but for the marks, which hold rank + 1.
at::Tensor marked(int rank) {
  at::Tensor tensor = at::zeros({kCount}, at::kChar);
  auto* const data = tensor.mutable_data_ptr<std::int8_t>();
  for (const std::int64_t mark : kMarks) data[mark] = static_cast<std::int8_t>(rank + 1);
  return tensor;
}

void expect_marks(const at::Tensor& tensor, int value, const char* what) {
  const auto* const data = tensor.const_data_ptr<std::int8_t>();
  for (const std::int64_t mark : kMarks) expect(data[mark] == value, what);
  // Their neighbours: nothing has moved to another place.
  expect(data[1] == 0 && data[kCount - 2] == 0 && data[kMarks[4] + 1] == 0, what);
}

bool has_memory_for(std::int64_t bytes) {
  return std::int64_t{::sysconf(_SC_AVPHYS_PAGES)} * ::sysconf(_SC_PAGESIZE) > bytes;
}

}  // namespace

TEST_CASE("tensors of more than 2^31 elements", "[huge]") {
  if (!has_memory_for(3 * kWorldSize * kCount / 2)) {
    WARN("not run: too little free memory");
    return;
  }
  run_group(kWorldSize, [](ProcessGroup& group) {
    at::Tensor tensor = marked(group.rank());
    group.all_reduce(tensor);
    expect_marks(tensor, 3, "all_reduce");
    group.broadcast(tensor, 1);
    expect_marks(tensor, 3, "broadcast");
  });
}
