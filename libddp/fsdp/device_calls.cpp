#include "libddp/fsdp/device_calls.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <string>
#include <utility>

#include "libddp/fsdp/flat_parameter.h"

namespace libddp {

void DeviceCalls::note(const ParamGroup& unit, Call call) {
  if (!ranks_ || unit.flats().empty()) return;
  const std::uint64_t place = unit.flats()[0]->spec().place;
  calls_ = (calls_ + 4 * place + static_cast<std::uint64_t>(call) + 1) * 0x9E3779B97F4A7C15u;
}

void DeviceCalls::compare(const char* when) {
  if (!ranks_) return;
  const std::string label =
      fmt::format("units {:06x} until the end of {}", std::exchange(calls_, 0) >> 40, when);
  ranks_->all_reduce(at::zeros({1}, at::kByte), {ReduceOp::Max}, {.async = true, .label = label});
}

}  // namespace libddp
