#pragma once

// What all steps of a bootstrap share: who is expected, who has come, and how failure spreads.
// Used by bootstrap.cpp only. Thread rule: one thread.
//
//   BootstrapContext context(store, options, deadline);
//   while (!something()) context.look_around();   // throws when the bootstrap cannot succeed

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/bootstrap_failure.h"
#include "libddp/bootstrap/bootstrap_session.h"
#include "libddp/bootstrap/key_value_store.h"
#include "libddp/bootstrap/peer_info.h"
#include "libddp/transport/process_handle.h"

namespace libddp {

class BootstrapContext {
 public:
  BootstrapContext(KeyValueStore& store, const BootstrapOptions& options, Deadline deadline)
      : store_(store), options_(options), deadline_(deadline) {}

  /// Where counters are; what stands in it may be anybody's.
  KeyValueStore& store() { return store_; }
  /// Where descriptions and addresses are. With a key, only those of this bootstrap; then only
  /// after session()->open().
  KeyValueStore& entries() { return session_ ? session_->entries() : store_; }
  /// Null without a run key.
  BootstrapSession* session() const { return session_.get(); }
  const BootstrapOptions& options() const { return options_; }
  Deadline deadline() const { return deadline_; }
  /// "libddp[group world, rank 1/4] bootstrap".
  std::string where() const;

  /// Reserves a place per rank, begins the session. Throws ArgumentError if rank and world size do
  /// not fit.
  void open();
  /// The own description, or another rank's after it was compared.
  void learn(PeerInfo info);
  const PeerInfo& info(int rank) const { return place(rank).info; }
  /// From now on the rank's end shows on its connection: it may even have finished.
  void reached(int rank) { place(rank).process = ProcessHandle(); }
  /// The connection is complete.
  void linked(int rank) { place(rank).is_linked = true; }
  bool is_linked(int rank) const { return place(rank).is_linked; }

  /// Between two pieces of a wait: throws if another rank has failed or died, the deadline is over,
  /// or the program was interrupted.
  void look_around();

  /// Publishes the cause, or takes over an earlier one, and throws it.
  [[noreturn]] void fail(const GroupFailure& failure);
  /// The deadline passed: names the ranks that are missing.
  [[noreturn]] void fail_timeout();
  /// `description`'s process does not answer: throws what it published before, or that it is gone.
  [[noreturn]] void fail_gone(const PeerInfo& info, const std::string& reason);
  /// For a failure of this rank's own; does nothing if the failure came from the store.
  void announce(const std::string& reason) noexcept;
  /// Until all other ranks have read the failure, or the deadline is over.
  void wait_until_heard();

 private:
  struct Place {
    PeerInfo info;
    ProcessHandle process;
    bool is_known = false;
    bool is_linked = false;
  };

  Place& place(int rank) { return places_[static_cast<std::size_t>(rank)]; }
  const Place& place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }
  void throw_published();
  void confirm() noexcept;
  void report_not_published(const std::string& reason) const noexcept;
  KeyValueStore& failures() { return session_ ? session_->failures() : store_; }
  bool has_come(int rank);

  KeyValueStore& store_;
  const BootstrapOptions& options_;
  const Deadline deadline_;
  const Deadline::Clock::time_point start_ = Deadline::Clock::now();
  std::unique_ptr<BootstrapSession> session_;
  std::vector<Place> places_;
  bool failure_is_published_ = false;
};

}  // namespace libddp
