#include "libddp/group/torch_store.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "libddp/base/backoff.h"
#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"

namespace libddp {

std::string torch_error_text(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

std::string store_host(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> below = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(below.get())) {
    below = prefixed->getUnderlyingNonPrefixStore();
  }
  if (auto* tcp = dynamic_cast<c10d::TCPStore*>(below.get())) return tcp->getHost();
  return env_text("MASTER_ADDR").value_or("");
}

TorchStore::TorchStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : store_(std::move(store)), prefix_(std::move(prefix)) {}

template <typename Call>
auto TorchStore::guarded(const char* what, const std::string& key, Call call) {
  try {
    return call(prefix_ + key);
  } catch (const std::exception& error) {
    throw StoreError(fmt::format(
        "libddp: the rendezvous store failed to {} key '{}{}': {}. Hint: the process that holds "
        "the store (rank 0 or the launcher) may have ended; look at its output.",
        what, prefix_, key, torch_error_text(error)));
  }
}

void TorchStore::set(const std::string& key, const std::string& value) {
  guarded("set", key, [&](const std::string& full) { store_->set(full, value); });
}

std::optional<std::string> TorchStore::try_get(const std::string& key) {
  return guarded("get", key, [&](const std::string& full) -> std::optional<std::string> {
    if (!store_->check({full})) return std::nullopt;
    return store_->get_to_str(full);
  });
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
  if (keys.empty() || !store_->hasExtendedApi()) return KeyValueStore::try_get_all(keys);
  std::vector<std::string> full;
  for (const std::string& key : keys) full.push_back(prefix_ + key);
  return guarded("get", keys.front(), [&](const std::string&) {
    std::optional<std::vector<std::string>> values;
    if (!store_->check(full)) return values;
    values.emplace();
    for (const auto& value : store_->multiGet(full))
      values->emplace_back(value.begin(), value.end());
    return values;
  });
}

long TorchStore::add(const std::string& key, long amount) {
  return guarded("add to", key, [&](const std::string& full) {
    return static_cast<long>(store_->add(full, amount));
  });
}

void TorchStore::remove(const std::string& key) {
  guarded("remove", key, [&](const std::string& full) { store_->deleteKey(full); });
}

}  // namespace libddp
