#include "libddp/bootstrap/key_value_store.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/printable.h"

namespace libddp {

std::optional<std::vector<std::string>> KeyValueStore::try_get_all(
    const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  for (const std::string& key : keys) {
    std::optional<std::string> value = try_get(key);
    if (!value) return std::nullopt;
    values.push_back(std::move(*value));
  }
  return values;
}

void InMemoryStore::set(const std::string& key, const std::string& value) {
  {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  changed_.notify_all();
}

std::optional<std::string> InMemoryStore::try_get(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string> InMemoryStore::wait_get(const std::string& key, Deadline deadline) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, deadline.remaining(kInterruptPeriod),
                        [&] { return values_.count(key) > 0; });
      const auto found = values_.find(key);
      if (found != values_.end()) return found->second;
    }
    if (deadline.expired()) return std::nullopt;
    check_interrupt();
  }
}

long InMemoryStore::add(const std::string& key, long amount) {
  long sum = 0;
  {
    const std::lock_guard lock(mutex_);
    std::string& value = values_[key];
    if (!value.empty()) {
      const char* end = value.data() + value.size();
      const auto [stop, error] = std::from_chars(value.data(), end, sum);
      if (error != std::errc() || stop != end) {
        throw StoreError(fmt::format("libddp: store key '{}' holds '{}', which is no counter.", key,
                                     printable(value)));
      }
    }
    sum += amount;
    value = std::to_string(sum);
  }
  changed_.notify_all();
  return sum;
}

void InMemoryStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  values_.erase(key);
}

}  // namespace libddp
