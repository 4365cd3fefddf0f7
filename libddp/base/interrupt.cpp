#include "libddp/base/interrupt.h"

#include <atomic>

namespace libddp {
namespace {

std::atomic<InterruptHook> installed_hook{nullptr};

}  // namespace

InterruptHook set_interrupt_hook(InterruptHook hook) { return installed_hook.exchange(hook); }

void check_interrupt() {
  if (InterruptHook hook = installed_hook.load(std::memory_order_acquire)) hook();
}

}  // namespace libddp
