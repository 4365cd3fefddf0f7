#include "libddp/group/all_reduce_each.h"

#include <utility>

#include "libddp/group/list_backend.h"

namespace libddp {

WorkPtr all_reduce_each(Backend& to, BackendCall call, const std::vector<Operand>& operands,
                        double scale) {
  for (const Operand& operand : operands) call.results.push_back(operand.user);
  const std::vector<at::Tensor> parts = wires(operands);
  at::Tensor flat = adjacent_view(parts);
  ListBackend* const lists = to.lists();
  if (!flat.defined() && lists != nullptr) {
    copy_back_after(call, operands);
    return lists->all_reduce_each(std::move(call), parts, scale);
  }
  if (!flat.defined()) {
    const at::Tensor& like = parts.front();
    flat = to.allocate({total_numel(operands)}, like.scalar_type(), like.device());
    pack(parts, flat);
    call.on_success = [flat, parts] { unpack(flat, parts); };
  }
  copy_back_after(call, operands);
  return to.all_reduce(std::move(call), flat, scale);
}

}  // namespace libddp
