#include "libddp/fsdp/units_on_devices.h"

#include <algorithm>

#include "libddp/fsdp/flat_parameter.h"

namespace libddp {

bool is_on_device(const ParamGroup& unit) {
  return !unit.flats().empty() && unit.flats()[0]->spec().is_on_device();
}

bool is_any_on_device(const std::vector<std::shared_ptr<ParamGroup>>& units) {
  return std::any_of(units.begin(), units.end(),
                     [](const auto& unit) { return is_on_device(*unit); });
}

Group device_ranks_of(const std::vector<std::shared_ptr<ParamGroup>>& units) {
  for (const auto& unit : units) {
    const Group& ranks = unit->options().shard ? unit->options().shard : unit->options().replicate;
    if (is_on_device(*unit) && ranks && ranks->size() > 1) return ranks;
  }
  return nullptr;
}

}  // namespace libddp
