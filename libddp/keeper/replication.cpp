#include "libddp/keeper/replication.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/transport/network_interface.h"

namespace libddp {
namespace {

/// The keeper serves nobody meanwhile; no name is looked up.
constexpr std::chrono::seconds kRouteTime{2};

std::string numeric_address(const std::string& where) {
  in6_addr parsed{};
  if (::inet_pton(AF_INET, where.c_str(), &parsed) == 1) return where;
  if (::inet_pton(AF_INET6, where.c_str(), &parsed) == 1) return where;
  if (where.empty()) {
    return choose_interface("", Deadline::after(kRouteTime), /*allows_loopback=*/true).address;
  }
  return matching_interfaces(network_interfaces(), "the address of the keeper", where)
      .front()
      .address;
}

TcpListener open_listener(const std::string& where) {
  const std::string address = numeric_address(where);
  try {
    return TcpListener::open(address);
  } catch (const NetworkError& error) {
    throw NetworkError(fmt::format(
        "libddp snapshot: the keeper cannot listen at {}: {}. Hint: give an address or an "
        "interface of this host.",
        printable(address), error.what()));
  }
}

bool is_same(const RunKey& one, const RunKey& other) {
  const Digest shown = one.tag({"same"});
  const Digest right = other.tag({"same"});
  return equal_bytes(shown.data(), right.data(), right.size());
}

}  // namespace

Replication::Replication(Options options, const KeptReplicas& replicas, ReplicaSender::Find find,
                         ReplicaPuller::Arrived arrived, std::function<void()> changed)
    : options_(std::move(options)),
      replicas_(replicas),
      find_(std::move(find)),
      arrived_(std::move(arrived)),
      changed_(std::move(changed)) {}

std::string Replication::listen(const std::string& where, std::shared_ptr<const RunKey> key) {
  if (sender_) {
    if (!is_same(*key_, *key)) {
      throw SnapshotError(
          "libddp snapshot: the keeper listens with another run key already. Hint: all processes "
          "of a run have one key.");
    }
    if (where != where_) {
      throw SnapshotError(fmt::format(
          "libddp snapshot: the keeper listens at {} already, not at '{}'. Hint: all processes of "
          "a host name one address.",
          address(), printable(where)));
    }
    return address();
  }
  sender_.emplace(open_listener(where), key, find_,
                  ReplicaSender::Options{.run = options_.run,
                                         .bytes_per_second = options_.bytes_per_second,
                                         .patience = options_.patience});
  puller_.emplace(key, replicas_, arrived_, changed_,
                  ReplicaPuller::Options{.run = options_.run,
                                         .patience = options_.patience,
                                         .memory_limit = options_.memory_limit,
                                         .next_pause = options_.next_pause});
  key_ = std::move(key);
  where_ = where;
  return address();
}

void Replication::pull(ReplicaPuller::Job job) {
  if (!puller_) {
    throw SnapshotError(
        "libddp snapshot: the keeper has no run key to show to other hosts. Hint: call listen() "
        "with it first.");
  }
  puller_->add(std::move(job));
}

ReplicaPuller::State Replication::state(int rank) const {
  return puller_ ? puller_->state(rank) : ReplicaPuller::State{};
}

bool Replication::is_coming(int rank, std::uint64_t generation, std::uint64_t sequence) const {
  return puller_ && puller_->is_coming(rank, generation, sequence);
}

std::string Replication::address() const { return sender_ ? sender_->endpoint().to_string() : ""; }

}  // namespace libddp
