#include "libddp/activation/op_interceptor.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <mutex>
#include <unordered_set>

#include "libddp/base/check.h"

namespace libddp {
namespace {

using Modes = c10::impl::TorchDispatchModeTLS;

/// Below autograd. Made for a project outside of torch that is no more.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet kKeysBelow(c10::DispatchKeySet::FULL_AFTER, kKey);

thread_local OpInterceptor* innermost_interceptor = nullptr;

/// All operators pass the key, until a kernel for one is registered. Never destroyed, as torch's
/// dispatcher may be gone before.
bool open_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kKey)) return false;
  new c10::RegistrationHandleRAII(dispatcher.registerFallback(
      kKey, c10::KernelFunction::makeFallthrough(), "libddp: operators pass"));
  return true;
}

/// A tracer's results stand for others, so they are no results to keep.
bool is_traced(c10::DispatchKeySet keys) {
  if (keys.has_backend(c10::BackendComponent::MetaBit)) return true;
  if (!Modes::any_modes_set()) return false;
  using Key = c10::impl::TorchDispatchModeKey;
  for (const Key key : {Key::FAKE, Key::PROXY, Key::FUNCTIONAL}) {
    if (Modes::get_mode(key)) return true;
  }
  return false;
}

}  // namespace

bool OpInterceptor::is_available() {
  static const bool is_open = open_key();
  return is_open;
}

void OpInterceptor::choose(const c10::OperatorHandle& op) {
  LIBDDP_CHECK(is_available(), "the dispatch key of interceptors is in use");
  static std::mutex mutex;
  static auto& chosen = *new std::unordered_set<c10::OperatorName>();
  const std::lock_guard lock(mutex);
  if (!chosen.insert(op.operator_name()).second) return;
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), kKey, c10::KernelFunction::makeFromBoxedFunction<&OpInterceptor::ask>(),
      std::nullopt, nullptr, "libddp: an interceptor is asked"));
}

void OpInterceptor::ask(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  const Op asked{op, keys & kKeysBelow};
  // Another thread that inherits this one's keys has no interceptor.
  if (innermost_interceptor == nullptr || is_traced(keys)) {
    op.redispatchBoxed(asked.keys, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard unseen(kKey);
  innermost_interceptor->on_op(asked, stack);
}

void OpInterceptor::run(const Op& op, torch::jit::Stack* stack) {
  if (outer_ != nullptr) {
    outer_->on_op(op, stack);
  } else {
    op.handle.redispatchBoxed(op.keys, stack);
  }
}

void OpInterceptor::enter() {
  outer_ = innermost_interceptor;
  innermost_interceptor = this;
  if (outer_ == nullptr) c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void OpInterceptor::leave() {
  innermost_interceptor = outer_;
  if (outer_ == nullptr) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

}  // namespace libddp
