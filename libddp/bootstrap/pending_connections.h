#pragma once

// Connections that an acceptor has accepted and that have not said yet who they are.
//
// Nobody is waited for, so one that says nothing holds up none that does. At most 256 may wait; the
// oldest that has not begun to speak gives way, and who belongs here comes again. Running out of
// descriptors drops a stranger, not the acceptor. Each has its time from accept to proof.
// Thread rule: one thread.
//
//   PendingConnections<Pending> pending(std::chrono::seconds(2), RefusalLog("refused", endpoint));
//   pending.accept_from(listener, welcome);   // welcome(each) reads what has come; it takes the
//   pending.hear_all(welcome);                // socket out of it, or closes it, where that is all

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "libddp/base/deadline.h"
#include "libddp/base/unique_fd.h"
#include "libddp/bootstrap/refusal_log.h"

namespace libddp {

/// What an acceptor knows of one of them; acceptors add what they have read.
struct PendingConnection {
  UniqueFd socket;
  Deadline patience = Deadline::never();
  /// Has said something that makes sense.
  bool is_heard = false;
};

/// Pending: derived from PendingConnection.
template <typename Pending>
class PendingConnections {
 public:
  static constexpr std::size_t kMost = 256;

  PendingConnections(std::chrono::seconds patience, RefusalLog refusals)
      : patience_(patience), refusals_(std::move(refusals)) {}

  std::size_t size() const { return waiting_.size(); }
  void report(const std::string& reason) { refusals_.report(reason); }

  /// `listener`: of the acceptor; left alone for a moment while there are no descriptors.
  void add_polls(int listener, std::vector<pollfd>& entries) const {
    if (pause_.expired()) entries.push_back({listener, POLLIN, 0});
    for (const Pending& each : waiting_) entries.push_back({each.socket.get(), POLLIN, 0});
  }

  /// Takes in those who wait at `listener`, up to a crowd.
  template <typename Listener, typename Welcome>
  void accept_from(Listener& listener, Welcome&& welcome) {
    for (std::size_t i = 0; i < kMost && pause_.expired(); ++i) {
      UniqueFd socket = listener.accept();
      if (socket) {
        take_in(std::move(socket), welcome);
      } else if (!listener.is_out_of_descriptors()) {
        return;
      } else {
        report("too many open files");
        if (waiting_.empty()) pause_ = Deadline::after(kPauseWithoutDescriptors);
        make_room();
      }
    }
  }

  template <typename Welcome>
  void take_in(UniqueFd socket, Welcome&& welcome) {
    if (waiting_.size() == kMost) make_room();
    Pending pending;
    pending.socket = std::move(socket);
    pending.patience = Deadline::after(patience_);
    // Most have spoken by now, so a crowd cannot push out who belongs here unheard.
    welcome(pending);
    if (pending.socket) waiting_.push_back(std::move(pending));
  }

  /// Moves everybody on as far as their bytes allow.
  template <typename Welcome>
  void hear_all(Welcome&& welcome) {
    for (Pending& each : waiting_) welcome(each);
    std::erase_if(waiting_, [](const Pending& each) { return !each.socket; });
  }

 private:
  static constexpr std::chrono::milliseconds kPauseWithoutDescriptors{20};

  void make_room() {
    if (waiting_.empty()) return;
    const auto silent = std::find_if(waiting_.begin(), waiting_.end(),
                                     [](const Pending& each) { return !each.is_heard; });
    waiting_.erase(silent == waiting_.end() ? waiting_.begin() : silent);
  }

  const std::chrono::seconds patience_;
  RefusalLog refusals_;
  std::deque<Pending> waiting_;
  Deadline pause_ = Deadline::after(std::chrono::milliseconds(0));
};

}  // namespace libddp
