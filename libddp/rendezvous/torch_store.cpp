#include "libddp/rendezvous/torch_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/backoff.h"
#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/printable.h"

namespace libddp {

std::string torch_error_text(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return printable(text.substr(0, text.find('\n')));
}

c10::intrusive_ptr<c10d::Store> bare_store(const c10::intrusive_ptr<c10d::Store>& store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    return prefixed->getUnderlyingNonPrefixStore();
  }
  return store;
}

std::string store_host(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> below = bare_store(store);
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(below.get())) return tcp->getHost();
  return env_text("MASTER_ADDR").value_or("");
}

std::string store_name(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> below = bare_store(store);
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(below.get())) {
    return fmt::format("the rendezvous store at {}:{}", tcp->getHost(), tcp->getPort());
  }
  if (auto* file = dynamic_cast<c10d::FileStore*>(below.get())) {
    return fmt::format("the rendezvous store in file {}", file->getPath());
  }
  return "the rendezvous store";
}

namespace {

/// For what is told when the time is up, or when a call was left for other reasons.
constexpr std::chrono::seconds kLastWords{1};

constexpr const char* kHolderHint =
    "Hint: the process that holds the store (rank 0 or the launcher) may have ended, be stopped, "
    "or "
    "be out of reach; look at its output and at the network to it.";

/// The thread for a store's calls. A call that hangs keeps it, so whoever comes next finds it busy.
std::shared_ptr<BlockingCalls> calls_of(const c10::intrusive_ptr<c10d::Store>& store) {
  static std::mutex mutex;
  static std::map<const c10d::Store*, std::weak_ptr<BlockingCalls>> known;
  const c10::intrusive_ptr<c10d::Store> below = bare_store(store);
  if (dynamic_cast<c10d::HashStore*>(below.get())) return nullptr;  // memory of this process
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<BlockingCalls>& place = known[below.get()];
  std::shared_ptr<BlockingCalls> calls = place.lock();
  if (!calls) place = calls = std::make_shared<BlockingCalls>("libddp-store");
  return calls;
}

/// As `call` is in the thread beside: nothing of the waiter's.
template <typename Call>
auto in_words(Call call, const c10::intrusive_ptr<c10d::Store>& store, const char* what,
              const std::string& key) {
  try {
    return call(*store, key);
  } catch (const std::exception& error) {
    throw StoreError(fmt::format("libddp: {} failed to {} key '{}': {}. {}", store_name(store),
                                 what, key, torch_error_text(error), kHolderHint));
  }
}

/// No value of ours, and not empty: comparing with it changes nothing.
constexpr const char* kNoValue = "libddp: no value";

/// torch's own stores compare and answer in one request. Between a check and a get the key may be
/// removed, and the get would wait for it until the store's timeout.
bool has_one_request(const c10d::Store& store) {
  return dynamic_cast<const c10d::TCPStore*>(&store) ||
         dynamic_cast<const c10d::FileStore*>(&store) ||
         dynamic_cast<const c10d::HashStore*>(&store);
}

}  // namespace

TorchStore::TorchStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix,
                       StoreLimits limits)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      limits_(std::move(limits)),
      calls_(calls_of(store_)) {}

template <typename T, typename Call>
T TorchStore::guarded(const char* what, const std::string& key, Call call) {
  if (!calls_) return in_words(std::move(call), store_, what, prefix_ + key);
  refuse_hanging();
  const auto start = Deadline::Clock::now();
  const bool is_late = limits_.deadline.remaining(kLastWords) < kLastWords;
  // `calls`: as long as it hangs, this store's thread is known to be busy.
  std::optional<T> result =
      calls_->run<T>([calls = calls_, store = store_, full = prefix_ + key, what,
                      call = std::move(call)] { return in_words(call, store, what, full); },
                     is_late ? Deadline::after(kLastWords) : limits_.deadline, limits_.look);
  if (result) return *std::move(result);
  const std::chrono::duration<double> waited = Deadline::Clock::now() - start;
  throw TimeoutError(fmt::format("libddp: {} did not answer within {:.1f} s (to {} key '{}{}'). {}",
                                 store_name(store_), waited.count(), what, prefix_, key,
                                 kHolderHint));
}

// A call that its waiter left at Ctrl-C may only be slow, and what comes next is the word to the
// other ranks about it.
void TorchStore::refuse_hanging() const {
  Backoff backoff(std::chrono::milliseconds(10));
  while (const auto hanging = calls_->hanging_for()) {
    if (*hanging >= kLastWords) {
      throw StoreError(
          fmt::format("libddp: {} cannot be used: a call to it has had no answer for {:.1f} s. {}",
                      store_name(store_), hanging->count(), kHolderHint));
    }
    backoff.pause();
  }
}

void TorchStore::set(const std::string& key, const std::string& value) {
  guarded<bool>("set", key, [value](c10d::Store& store, const std::string& full) {
    store.set(full, value);
    return true;
  });
}

std::optional<std::string> TorchStore::try_get(const std::string& key) {
  using Value = std::optional<std::string>;
  const bool is_one_request = has_one_request(*bare_store(store_));
  const auto read = [is_one_request](c10d::Store& store, const std::string& full) -> Value {
    if (is_one_request) {
      std::string value = store.compareSet(full, kNoValue, kNoValue);
      return value == kNoValue ? Value() : Value(std::move(value));
    }
    if (!store.check({full})) return std::nullopt;
    return store.get_to_str(full);
  };
  return guarded<Value>("get", key, read);
}

std::optional<std::string> TorchStore::wait_get(const std::string& key, Deadline deadline) {
  Backoff backoff(std::chrono::milliseconds(50));  // asking costs a round trip
  InterruptPoll interrupt;
  while (true) {
    if (auto value = try_get(key)) return value;
    if (deadline.expired()) return std::nullopt;
    backoff.pause(deadline);
    interrupt.poll();
  }
}

std::optional<std::vector<std::string>> TorchStore::try_get_all(
    const std::vector<std::string>& keys) {
  using Values = std::optional<std::vector<std::string>>;
  if (keys.empty() || !store_->hasExtendedApi()) return KeyValueStore::try_get_all(keys);
  std::vector<std::string> full_keys;
  for (const std::string& key : keys) full_keys.push_back(prefix_ + key);
  const auto read_all = [full_keys](c10d::Store& store, const std::string&) -> Values {
    if (!store.check(full_keys)) return std::nullopt;
    Values values(std::in_place);
    for (const auto& value : store.multiGet(full_keys)) {
      values->emplace_back(value.begin(), value.end());
    }
    return values;
  };
  return guarded<Values>("get", keys.front(), read_all);
}

long TorchStore::add(const std::string& key, long amount) {
  return guarded<long>("add to", key, [amount](c10d::Store& store, const std::string& full) {
    return static_cast<long>(store.add(full, amount));
  });
}

void TorchStore::remove(const std::string& key) {
  guarded<bool>("remove", key,
                [](c10d::Store& store, const std::string& full) { return store.deleteKey(full); });
}

}  // namespace libddp
