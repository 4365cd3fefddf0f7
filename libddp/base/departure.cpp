#include "libddp/base/departure.h"

#include <atomic>
#include <mutex>

#include "libddp/base/error.h"

namespace libddp {
namespace {

std::atomic<bool> is_asked{false};

struct Reason {
  std::mutex mutex;
  std::string text;
};

Reason& reason() {
  static auto* const kept = new Reason;  // threads may look while the process ends
  return *kept;
}

}  // namespace

void ask_to_depart(const std::string& text) {
  const std::lock_guard lock(reason().mutex);
  reason().text = text;
  is_asked = true;
}

void withdraw_departure() { is_asked = false; }

bool is_departing() { return is_asked; }

void throw_if_departing() {
  if (!is_asked.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(reason().mutex);
  throw PeerError(reason().text, -1);
}

}  // namespace libddp
