#include "libddp/activation/autocast_state.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

namespace libddp {

AutocastState::Kind AutocastState::kind_now(c10::DeviceType type) {
  return {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)};
}

AutocastState AutocastState::now(const std::vector<c10::Device>& devices) {
  AutocastState state;
  state.kinds_.push_back(kind_now(c10::kCPU));
  for (c10::Device device : devices) {
    const auto known = std::find_if(state.kinds_.begin(), state.kinds_.end(),
                                    [&](const Kind& kind) { return kind.type == device.type(); });
    if (known == state.kinds_.end()) state.kinds_.push_back(kind_now(device.type()));
  }
  state.is_caching_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

bool AutocastState::is_enabled() const {
  return std::any_of(kinds_.begin(), kinds_.end(),
                     [](const Kind& kind) { return kind.is_enabled; });
}

AutocastState AutocastState::same_kinds_now() const {
  AutocastState state;
  for (const Kind& kind : kinds_) state.kinds_.push_back(kind_now(kind.type));
  state.is_caching_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::apply() const {
  for (const Kind& kind : kinds_) {
    at::autocast::set_autocast_enabled(kind.type, kind.is_enabled);
    at::autocast::set_autocast_dtype(kind.type, kind.dtype);
  }
  at::autocast::set_autocast_cache_enabled(is_caching_);
}

AutocastScope::AutocastScope(const AutocastState& state)
    : former_(state.same_kinds_now()), is_active_(state.is_enabled() || former_.is_enabled()) {
  if (!is_active_) return;
  state.apply();
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!is_active_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  former_.apply();
}

}  // namespace libddp
