#include "libddp/fsdp/owned_tensors.h"

#include <mutex>
#include <unordered_set>

namespace libddp {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_set<const void*> owned;
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

bool OwnedTensors::add(const at::Tensor& tensor) {
  const void* const key = tensor.unsafeGetTensorImpl();
  const std::lock_guard lock(registry().mutex);
  if (!registry().owned.insert(key).second) return false;
  added_.push_back(key);
  return true;
}

}  // namespace libddp
