#pragma once

// Which receive gets which unexpected message: the rule of both mailboxes (mailbox.h, link_mail.h).
// Thread rule: as the mailbox.
//
//   const auto rank_of = [](const UnexpectedMessage& message) { return message.source; };
//   match_unexpected(messages, parts, rank_of,
//                    [](Transfer& part, UnexpectedMessage& message) { ... });

#include <algorithm>
#include <deque>
#include <vector>

#include "libddp/collectives/comm.h"

namespace libddp {

/// Hands each unexpected message, in order, to the first receive among `parts` that waits for its
/// tag and its source (`rank_of`, in the group), and drops it then. False if none was handed over.
template <typename UnexpectedMessage, typename RankOf, typename Deliver>
bool match_unexpected(std::deque<UnexpectedMessage>& unexpected_messages,
                      const std::vector<Comm::Transfer*>& parts, RankOf rank_of, Deliver deliver) {
  bool moved = false;
  for (auto unexpected = unexpected_messages.begin(); unexpected != unexpected_messages.end();) {
    const int source = rank_of(*unexpected);
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const auto* candidate) {
      return !candidate->is_send && !candidate->is_started && candidate->tag == unexpected->tag &&
             (candidate->peer < 0 || candidate->peer == source);
    });
    if (part == parts.end()) {
      ++unexpected;
      continue;
    }
    deliver(**part, *unexpected);
    unexpected = unexpected_messages.erase(unexpected);
    moved = true;
  }
  return moved;
}

}  // namespace libddp
