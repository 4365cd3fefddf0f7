// Point to point: send, recv and batches of them.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "libddp/group/group_state.h"

namespace libddp {
namespace {

using Direction = Exchange::Direction;

/// Pairs the parts that this rank exchanges with itself, in order per tag; they become copies.
std::vector<std::pair<at::Tensor, at::Tensor>> take_own_parts(const CallSite& site,
                                                              std::vector<Exchange>& parts) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<Exchange> others;
  std::vector<Exchange> sends;
  std::vector<Exchange> receives;
  for (Exchange& part : parts) {
    const bool is_own = part.peer == site.group.rank;
    auto& list = !is_own ? others : part.direction == Direction::Send ? sends : receives;
    list.push_back(std::move(part));
  }
  for (Exchange& receive : receives) {
    auto send = std::find_if(sends.begin(), sends.end(),
                             [&](const Exchange& part) { return part.tag == receive.tag; });
    if (send == sends.end()) {
      site.refuse(fmt::format("a receive from this rank itself (tag {}) has no send in the same "
                              "exchange",
                              receive.tag),
                  "put both sides into one exchange");
    }
    check_same_numel(site, "own send", send->tensor, "own receive", receive.tensor);
    check_same_dtype(site, "own send", send->tensor, "own receive", receive.tensor);
    copies.emplace_back(send->tensor, receive.tensor);
    sends.erase(send);
  }
  if (!sends.empty()) {
    site.refuse(fmt::format("a send to this rank itself (tag {}) has no receive in the same "
                            "exchange",
                            sends.front().tag),
                "put both sides into one exchange");
  }
  parts = std::move(others);
  return copies;
}

}  // namespace

WorkPtr ProcessGroup::send(const at::Tensor& tensor, int target, int tag, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("send");
  check_peer(site, "target", target);
  check_tag(site, tag);
  const Operand operand = make_operand(site, "tensor", tensor, Access::Read);
  BackendCall call = state.call(site, OpKind::Send, operand, options);
  call.description.root = target;
  call.results.push_back(tensor);
  return state.backend->exchange(std::move(call), {{Direction::Send, operand.wire, target, tag}});
}

WorkPtr ProcessGroup::recv(const at::Tensor& tensor, std::optional<int> source, int tag,
                           CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("recv");
  if (source) {
    check_peer(site, "source", *source);
  } else if (state.identity.world_size == 1) {
    site.refuse("there is no other rank to receive from", "start more ranks");
  }
  check_tag(site, tag);
  const Operand operand = make_operand(site, "tensor", tensor, Access::Write);
  BackendCall call = state.call(site, OpKind::Recv, operand, options);
  call.description.root = source.value_or(-1);
  call.results.push_back(tensor);
  if (operand.is_copy) copy_back_after(call, {operand});
  return state.backend->exchange(std::move(call),
                                 {{Direction::Recv, operand.wire, source.value_or(-1), tag}});
}

WorkPtr ProcessGroup::exchange(std::vector<Exchange> parts, CallOptions options) {
  const State& state = *state_;
  const CallSite site = state.enter("exchange");
  if (parts.empty()) site.refuse("parts is empty", "pass one send or receive or more");
  std::vector<Operand> targets;
  std::vector<at::Tensor> results;
  Dtype dtype = Dtype::UInt8;
  std::int64_t numel = 0;
  bool is_any_send = false;
  for (Exchange& part : parts) {
    const bool is_send = part.direction == Direction::Send;
    if (is_send || part.peer != -1) check_rank(site, "peer", part.peer);
    check_tag(site, part.tag);
    Operand operand =
        make_operand(site, "tensor", part.tensor, is_send ? Access::Read : Access::Write);
    results.push_back(part.tensor);
    part.tensor = operand.wire;
    dtype = operand.dtype;
    numel += operand.wire.numel();
    is_any_send = is_any_send || is_send;
    if (!is_send) targets.push_back(std::move(operand));
  }
  auto copies = take_own_parts(site, parts);
  BackendCall call =
      state.call(site, is_any_send ? OpKind::Send : OpKind::Recv, dtype, numel, options);
  call.results = std::move(results);
  if (!copies.empty()) {
    call.on_success = [copies = std::move(copies)] {
      for (const auto& [from, to] : copies) unpack(from, {to});
    };
  }
  copy_back_after(call, targets);
  return state.backend->exchange(std::move(call), std::move(parts));
}

}  // namespace libddp
