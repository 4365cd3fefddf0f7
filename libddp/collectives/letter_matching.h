#pragma once

// Which receive gets which letter: the rule of both mailboxes (mailbox.h, link_mail.h).
// Thread rule: as the mailbox.
//
//   match_letters(letters, parts, [](const Letter& letter) { return letter.source; },
//                 [](Transfer& part, Letter& letter) { ... });

#include <algorithm>
#include <deque>
#include <vector>

#include "libddp/collectives/comm.h"

namespace libddp {

/// Hands each letter, in order, to the first receive among `parts` that waits for its tag and its
/// source (`rank_of`, in the group), and drops it then. False if none was handed over.
template <typename Letter, typename RankOf, typename Deliver>
bool match_letters(std::deque<Letter>& letters, const std::vector<Comm::Transfer*>& parts,
                   RankOf rank_of, Deliver deliver) {
  bool moved = false;
  for (auto letter = letters.begin(); letter != letters.end();) {
    const int source = rank_of(*letter);
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const auto* candidate) {
      return !candidate->is_send && !candidate->is_started && candidate->tag == letter->tag &&
             (candidate->peer < 0 || candidate->peer == source);
    });
    if (part == parts.end()) {
      ++letter;
      continue;
    }
    deliver(**part, *letter);
    letter = letters.erase(letter);
    moved = true;
  }
  return moved;
}

}  // namespace libddp
