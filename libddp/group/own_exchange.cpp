#include "libddp/group/own_exchange.h"

#include <fmt/format.h>

#include <algorithm>

namespace libddp {

std::vector<std::pair<at::Tensor, at::Tensor>> take_own_parts(const CallSite& site,
                                                              std::vector<Exchange>& parts) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<Exchange> others;
  std::vector<Exchange> sends;
  std::vector<Exchange> receives;
  for (Exchange& part : parts) {
    const bool is_own = part.peer == site.group.rank;
    auto& list = !is_own ? others : part.direction == Exchange::Direction::Send ? sends : receives;
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

}  // namespace libddp
