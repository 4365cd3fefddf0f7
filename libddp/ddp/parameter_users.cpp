#include "libddp/ddp/parameter_users.h"

#include <mutex>
#include <unordered_map>

namespace libddp {

namespace {

struct Known {
  std::mutex mutex;
  /// A user holds its parameter, so an address stands for one parameter as long as it has users.
  std::unordered_map<const void*, std::weak_ptr<void>> counts;
};

// Never destroyed: users may be objects of other static storage.
Known& known_users() {
  static auto* const instance = new Known();
  return *instance;
}

}  // namespace

std::shared_ptr<ParameterUser::Counts> ParameterUser::counts_of(const at::Tensor& parameter) {
  const void* const key = parameter.unsafeGetTensorImpl();
  const auto forget = [key](Counts* counts) {
    delete counts;
    const std::lock_guard lock(known_users().mutex);
    const auto entry = known_users().counts.find(key);
    // Another one may have come meanwhile.
    if (entry != known_users().counts.end() && entry->second.expired())
      known_users().counts.erase(entry);
  };
  const std::lock_guard lock(known_users().mutex);
  std::weak_ptr<void>& entry = known_users().counts[key];
  auto counts = std::static_pointer_cast<Counts>(entry.lock());
  if (counts) return counts;
  counts = std::shared_ptr<Counts>(new Counts(), forget);
  entry = counts;
  return counts;
}

std::atomic<int> ParameterUser::num_common{0};

ParameterUser::ParameterUser(const at::Tensor& parameter) : counts_(counts_of(parameter)) {
  if (++counts_->num_users == 2) ++num_common;
}

ParameterUser::~ParameterUser() {
  if (!counts_) return;
  if (has_claimed_) --counts_->num_claims;
  if (--counts_->num_users == 1) --num_common;
}

void ParameterUser::claim() {
  if (!has_claimed_) ++counts_->num_claims;
  has_claimed_ = true;
}

bool ParameterUser::is_disputed() const { return is_common() && counts_->num_claims.load() > 0; }

void ParameterPass::add(const ParameterUser& user) {
  if (!user.is_common()) return;
  ++user.counts_->num_passes;
  counts_.push_back(user.counts_);
}

ParameterPass::~ParameterPass() {
  for (const auto& counts : counts_) --counts->num_passes;
}

}  // namespace libddp
