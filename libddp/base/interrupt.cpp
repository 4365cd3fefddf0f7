#include "libddp/base/interrupt.h"

#include <atomic>

#include "libddp/base/departure.h"

namespace libddp {
namespace {

std::atomic<InterruptHook> installed_hook{nullptr};

}  // namespace

InterruptHook set_interrupt_hook(InterruptHook hook) { return installed_hook.exchange(hook); }

void check_interrupt() {
  throw_if_departing();
  if (InterruptHook hook = installed_hook.load(std::memory_order_acquire)) hook();
}

}  // namespace libddp
