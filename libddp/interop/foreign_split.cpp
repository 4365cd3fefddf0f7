// ForeignBackend::split: a part of the other library's group, made by that library.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/interop/c10d_failure.h"
#include "libddp/interop/foreign_state.h"
#include "libddp/interop/gloo_engine.h"

namespace libddp {
namespace {

/// Gloo writes into what it is given for a part, and reads the whole's ranks without a check.
c10::intrusive_ptr<c10d::Backend::Options> options_for_part(c10d::Backend& whole) {
  auto own = backend_options(whole);
  if (!own) return nullptr;
  for (int rank = 0; own->global_ranks_in_group.size() < static_cast<std::size_t>(whole.getSize());
       ++rank) {
    own->global_ranks_in_group.push_back(static_cast<std::uint64_t>(rank));
  }
  return copy_of_gloo_options(own);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend::Options> backend_options(c10d::Backend& backend) {
  try {
    return backend.getBackendOptions();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::unique_ptr<Backend> ForeignBackend::split(const std::vector<int>& ranks,
                                               const GroupIdentity& part) {
  if (!state_->store || !state_->inner->supportsSplitting()) return nullptr;
  std::string place = fmt::format("libddp/split/{}/{}", part.name, fmt::join(ranks, ","));
  {
    // The same ranks may part under the same name again; what they left in the store is old then.
    const std::lock_guard lock(state_->mutex);
    place += fmt::format("/{}/", state_->num_parts[place]++);
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>(place, state_->store);
  c10::intrusive_ptr<c10d::Backend> inner;
  try {
    inner = state_->inner->split(store, ranks, options_for_part(*state_->inner));
  } catch (...) {
    std::rethrow_exception(error_of_c10d(std::current_exception(),
                                         state_->where("split " + part.name), state_->inner_name));
  }
  if (!inner) return nullptr;
  return std::make_unique<ForeignBackend>(std::move(inner), part, std::move(store));
}

}  // namespace libddp
