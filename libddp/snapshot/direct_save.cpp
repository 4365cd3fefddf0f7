#include "libddp/snapshot/direct_save.h"

#include <fmt/format.h>

#include <string>

#include "libddp/base/random.h"
#include "libddp/snapshot/tensor_source.h"

namespace libddp {

std::uint64_t save_directly(const JobRanks& ranks, SnapshotStore& store, const SavedStep& saved,
                            int keep, const OwnPieces& own, std::string_view values) {
  check_same_step(ranks.gather_numbers({saved.step}));
  // Files of different saves never have one name, also where one of them has failed.
  const std::string start = ranks.from_first(random_hex(4));
  const std::string what = fmt::format("save step {}", saved.step);
  const TensorSource source(own, ranks.rank(), saved.step);
  ranks.together(what, [&] {
    store.add_rank(saved, start, ranks.rank(), ranks.size(), source, std::string(values));
  });
  ranks.together(what, [&] {
    if (ranks.rank() != 0) return;
    store.commit(saved, start, ranks.size());
    store.keep_newest(keep, start);
  });
  return source.layout().data_bytes();
}

}  // namespace libddp
