#include "libddp/bootstrap/prefixed_store.h"

#include <utility>

namespace libddp {

PrefixedStore::PrefixedStore(std::shared_ptr<KeyValueStore> below, std::string prefix)
    : below_(std::move(below)), prefix_(std::move(prefix)) {}

void PrefixedStore::set(const std::string& key, const std::string& value) {
  below_->set(prefix_ + key, value);
}

std::optional<std::string> PrefixedStore::try_get(const std::string& key) {
  return below_->try_get(prefix_ + key);
}

std::optional<std::string> PrefixedStore::wait_get(const std::string& key, Deadline deadline) {
  return below_->wait_get(prefix_ + key, deadline);
}

std::optional<std::vector<std::string>> PrefixedStore::try_get_all(
    const std::vector<std::string>& keys) {
  std::vector<std::string> full;
  for (const std::string& key : keys) full.push_back(prefix_ + key);
  return below_->try_get_all(full);
}

long PrefixedStore::add(const std::string& key, long amount) {
  return below_->add(prefix_ + key, amount);
}

void PrefixedStore::remove(const std::string& key) { below_->remove(prefix_ + key); }

}  // namespace libddp
