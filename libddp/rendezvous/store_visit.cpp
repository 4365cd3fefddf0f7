#include "libddp/rendezvous/store_visit.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <mutex>

#include "libddp/base/backoff.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/rendezvous/torch_store.h"

namespace libddp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr const char* kPrefix = "libddp/rendezvous/";
constexpr const char* kName = "name";
/// Between listening and naming rank 0 does nothing else.
constexpr std::chrono::milliseconds kTimeToName{500};

/// Place -> the name of the store that was left there.
struct Memory {
  std::mutex mutex;
  std::map<std::string, std::string> names;
};

Memory& memory() {
  static Memory memory;
  return memory;
}

std::string remembered_at(const std::string& place) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().names.find(place);
  return found == memory().names.end() ? "" : found->second;
}

/// "" where it has none.
std::string name_of(const StorePtr& store, Deadline deadline) {
  TorchStore keys(store, kPrefix, {.deadline = deadline});
  const auto soon = std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining(kTimeToName));
  return keys.wait_get(kName, Deadline::after(soon)).value_or("");
}

[[noreturn]] void refuse_left(const StoreVisit& visit) {
  throw TimeoutError(fmt::format(
      "libddp: the store at {} is still that of the group which this rank has left. Hint: rank 0 "
      "must call destroy_process_group() and init_process_group() too, or use another port.",
      visit.place));
}

/// Waits while the store is the one that was left.
void wait_while_left(StoreVisit& visit, const StorePtr& store, const std::string& left,
                     Deadline deadline) {
  Backoff backoff(kInterruptPeriod);
  InterruptPoll interrupt;
  while (visit.name == left) {
    if (deadline.expired()) refuse_left(visit);
    backoff.pause(deadline);
    interrupt.poll();
    visit.name = name_of(store, deadline);
  }
}

}  // namespace

void name_store(const StorePtr& store, Deadline deadline) {
  TorchStore keys(store, kPrefix, {.deadline = deadline});
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  keys.set(kName, fmt::format("{}-{}", ::getpid(), now.count()));
}

StorePtr open_unvisited(StoreVisit& visit, const std::function<StorePtr()>& open,
                        Deadline deadline) {
  const std::string left = remembered_at(visit.place);
  Backoff backoff(kInterruptPeriod);
  while (true) {
    try {
      StorePtr store = open();
      visit.name = name_of(store, deadline);
      if (!left.empty()) wait_while_left(visit, store, left, deadline);
      return store;
    } catch (const NetworkError&) {
      if (left.empty() || deadline.expired()) throw;
    } catch (const StoreError&) {
      if (left.empty() || deadline.expired()) throw;
    }
    backoff.pause(deadline);
  }
}

void remember(const StoreVisit& visit) {
  if (visit.place.empty()) return;
  const std::lock_guard<std::mutex> lock(memory().mutex);
  if (visit.name.empty()) {
    memory().names.erase(visit.place);
  } else {
    memory().names[visit.place] = visit.name;
  }
}

}  // namespace libddp
