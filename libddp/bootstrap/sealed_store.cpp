#include "libddp/bootstrap/sealed_store.h"

#include <fmt/format.h>

#include <chrono>
#include <string_view>
#include <utility>

#include "libddp/base/backoff.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"

namespace libddp {
namespace {

constexpr std::string_view kSealFormat = "libddp-sealed-1 ";
constexpr std::size_t kTagDigits = 2 * sizeof(Digest);

std::string tag_text(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

}  // namespace

SealedStore::SealedStore(KeyValueStore& below, std::shared_ptr<const RunKey> key,
                         std::string context)
    : below_(below), key_(std::move(key)), context_(std::move(context)) {}

std::string SealedStore::seal(const std::string& key, const std::string& value) const {
  const std::string tag = tag_text(key_->tag({"libddp store entry", context_, key, value}));
  return fmt::format("{}{} {}", kSealFormat, tag, value);
}

std::optional<std::string> SealedStore::open(const std::string& key,
                                             const std::string& text) const {
  const std::size_t begin = kSealFormat.size() + kTagDigits + 1;
  if (text.size() < begin || text.size() > kMaxValueBytes) return std::nullopt;
  std::string value = text.substr(begin);
  const std::string sealed = seal(key, value);
  if (!equal_bytes(sealed.data(), text.data(), begin)) return std::nullopt;
  return value;
}

void SealedStore::report(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (!reported_.insert(key).second) return;
  log(LogLevel::Warn, "store_entry_refused",
      {{"context", context_},
       {"key", key},
       {"reason", "not sealed with this run's key: of another run, another key, or forged"}});
}

void SealedStore::set(const std::string& key, const std::string& value) {
  below_.set(key, seal(key, value));
}

std::optional<std::string> SealedStore::try_get(const std::string& key) {
  const std::optional<std::string> text = below_.try_get(key);
  if (!text) return std::nullopt;
  std::optional<std::string> value = open(key, *text);
  if (!value) report(key);
  return value;
}

std::optional<std::string> SealedStore::wait_get(const std::string& key, Deadline deadline) {
  Backoff backoff(std::chrono::milliseconds(20));
  while (true) {
    if (const std::optional<std::string> text = below_.wait_get(key, deadline)) {
      if (std::optional<std::string> value = open(key, *text)) return value;
      report(key);
    }
    if (deadline.expired()) return std::nullopt;
    // The right one may still replace it.
    backoff.pause(deadline);
    check_interrupt();
  }
}

std::optional<std::vector<std::string>> SealedStore::try_get_all(
    const std::vector<std::string>& keys) {
  auto values = below_.try_get_all(keys);
  if (!values) return std::nullopt;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    std::optional<std::string> value = open(keys[i], (*values)[i]);
    if (!value) {
      report(keys[i]);
      return std::nullopt;
    }
    (*values)[i] = std::move(*value);
  }
  return values;
}

long SealedStore::add(const std::string& key, long amount) { return below_.add(key, amount); }

void SealedStore::remove(const std::string& key) { below_.remove(key); }

}  // namespace libddp
