#include "libddp/group/block_exchange.h"

#include <utility>

namespace libddp {

void BlockExchange::send(int rank, const at::Tensor& wire) {
  if (rank == group_.rank) {
    own_input_ = wire;
  } else {
    parts_.push_back({Exchange::Direction::Send, wire, rank, 0});
  }
}

void BlockExchange::receive(int rank, const Operand& operand) {
  if (rank == group_.rank) {
    own_output_ = operand.wire;
  } else {
    parts_.push_back({Exchange::Direction::Recv, operand.wire, rank, 0});
  }
  if (operand.is_copy) targets_.push_back(operand);
}

WorkPtr BlockExchange::launch(Backend& backend, BackendCall&& call) {
  if (own_input_.defined() && own_output_.defined()) {
    call.on_success = [input = own_input_, output = own_output_] { unpack(input, {output}); };
  }
  copy_back_after(call, targets_);
  return backend.exchange(std::move(call), std::move(parts_));
}

WorkPtr BlockExchange::launch_even(Backend& backend, BackendCall&& call, const at::Tensor& output,
                                   const at::Tensor& input) {
  call.on_success = [from = own_input_, to = own_output_] { unpack(from, {to}); };
  copy_back_after(call, targets_);
  return backend.all_to_all(std::move(call), output, input, std::move(parts_));
}

}  // namespace libddp
