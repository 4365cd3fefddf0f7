#pragma once

// A c10d::Store (TCPStore, FileStore, HashStore, PrefixStore) as the core's KeyValueStore.
//
// torch's clients wait without end for a store that does not answer: its process is stopped, or the
// network is down. So the calls run in a thread beside (blocking_calls.h), one for all TorchStores
// over one store, and end at the deadline, when `look` throws, or at Ctrl-C. A store in which a
// call hangs for more than a second is refused at once until it has answered. Whatever torch throws
// becomes a StoreError with its first line; each error names the store. Thread rule: any thread, as
// the store below.
//
//   TorchStore store(c10::make_intrusive<c10d::HashStore>(), "libddp/world/", {.deadline = end});
//   store.set("peer/0", text);

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "libddp/base/blocking_calls.h"
#include "libddp/base/deadline.h"
#include "libddp/bootstrap/key_value_store.h"

namespace libddp {

/// What an exception of torch says, without its stack trace.
std::string torch_error_text(const std::exception& error);

/// The host that a TCP store (below prefixes) is on, as its clients name it; else MASTER_ADDR;
/// empty if neither is known.
std::string store_host(const c10::intrusive_ptr<c10d::Store>& store);

/// "the rendezvous store at 10.0.0.7:29500", for messages.
std::string store_name(const c10::intrusive_ptr<c10d::Store>& store);

/// The store below all prefixes.
c10::intrusive_ptr<c10d::Store> bare_store(const c10::intrusive_ptr<c10d::Store>& store);

/// When the calls of a TorchStore end at the latest.
struct StoreLimits {
  /// A call that begins close to it or later, to tell others of a failure, has a second.
  Deadline deadline = Deadline::never();
  /// Called ten times a second; what it throws ends the call.
  std::function<void()> look{};
};

class TorchStore : public KeyValueStore {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix, StoreLimits limits = {});

  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> try_get(const std::string& key) override;
  std::optional<std::string> wait_get(const std::string& key, Deadline deadline) override;
  std::optional<std::vector<std::string>> try_get_all(
      const std::vector<std::string>& keys) override;
  long add(const std::string& key, long amount) override;
  void remove(const std::string& key) override;

 private:
  /// `call(store, full key)` owns what it uses.
  template <typename T, typename Call>
  T guarded(const char* what, const std::string& key, Call call);
  /// Throws where a call that was given up has had a second and still has no answer.
  void refuse_hanging() const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  const StoreLimits limits_;
  /// Null where no call can hang.
  const std::shared_ptr<BlockingCalls> calls_;
};

}  // namespace libddp
