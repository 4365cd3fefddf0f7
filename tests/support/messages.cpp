#include "tests/support/messages.h"

#include <algorithm>
#include <chrono>

namespace libddp::test {
namespace {

void run(Comm& comm, const CommCall& call, const std::vector<Comm::Transfer*>& parts) {
  using namespace std::chrono_literals;
  const Deadline deadline = call.timeout ? Deadline::after(*call.timeout) : call.deadline;
  const auto is_done = [](const Comm::Transfer* part) { return part->is_done; };
  while (true) {
    comm.throw_if_failed(&call);
    const std::uint32_t ticket = comm.mail_ticket();
    comm.progress(parts);
    if (std::all_of(parts.begin(), parts.end(), is_done)) return;
    if (deadline.expired()) {
      comm.fail({.kind = GroupFailure::Kind::Timeout, .message = "the messages did not move"});
      comm.throw_if_failed(&call);
    }
    comm.wait_for_mail(ticket, deadline.remaining(100ms));
  }
}

}  // namespace

void exchange(Comm& comm, const CommCall& call, std::vector<Comm::Transfer> parts) {
  std::vector<Comm::Transfer*> pointers;
  for (Comm::Transfer& part : parts) pointers.push_back(&part);
  run(comm, call, pointers);
}

void send(Comm& comm, const CommCall& call, const void* data, std::uint64_t bytes, int target,
          int tag) {
  // Nobody writes through the pointer of a send.
  Comm::Transfer part{
      .is_send = true, .peer = target, .tag = tag, .data = const_cast<void*>(data), .bytes = bytes};
  run(comm, call, {&part});
}

int recv(Comm& comm, const CommCall& call, void* data, std::uint64_t bytes, int source, int tag) {
  Comm::Transfer part{.peer = source, .tag = tag, .data = data, .bytes = bytes};
  run(comm, call, {&part});
  return part.source;
}

}  // namespace libddp::test
