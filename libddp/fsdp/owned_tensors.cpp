#include "libddp/fsdp/owned_tensors.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace libddp {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> owned;
};

Registry& registry() {
  static Registry* const made = new Registry;  // outlives every unit
  return *made;
}

}  // namespace

OwnedTensors::~OwnedTensors() {
  const std::lock_guard lock(registry().mutex);
  for (const void* tensor : added_) registry().owned.erase(tensor);
}

std::optional<std::string> OwnedTensors::add(const at::Tensor& tensor, std::string words) {
  const void* const key = tensor.unsafeGetTensorImpl();
  const std::lock_guard lock(registry().mutex);
  const auto [known, is_new] = registry().owned.try_emplace(key, std::move(words));
  if (!is_new) return known->second;
  added_.push_back(key);
  return std::nullopt;
}

}  // namespace libddp
