#pragma once

// A c10d::Store (TCPStore, FileStore, HashStore, PrefixStore) as the core's KeyValueStore.
//
// Waits poll in small pieces, so that Ctrl-C and a failed meeting are seen; whatever torch throws
// becomes a StoreError with its first line.
// Thread rule: any thread, as the store below.
//
//   TorchStore store(c10::make_intrusive<c10d::HashStore>(), "libddp/world/");
//   store.set("card/0", text);

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/transport/key_value_store.h"

namespace libddp {

/// What an exception of torch says, without its stack trace.
std::string torch_error_text(const std::exception& error);

/// The host that a TCP store (below prefixes) is on, as its clients name it; else MASTER_ADDR;
/// empty if neither is known.
std::string store_host(const c10::intrusive_ptr<c10d::Store>& store);

class TorchStore : public KeyValueStore {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix);

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  std::optional<std::vector<std::string>> try_get_all(
      const std::vector<std::string>& keys) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  template <typename Call>
  auto guarded(const char* what, const std::string& key, Call call);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
};

}  // namespace libddp
