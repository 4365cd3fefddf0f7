#include "libddp/collectives/inter_stage.h"

#include <algorithm>

#include "libddp/kernels/copy_bytes.h"

namespace libddp {

void InterStage::all_reduce_prepared(std::byte* data, std::size_t count, const Reduction& reduction,
                                     int num_averaged, Preparation& preparation) {
  while (preparation.step()) {
  }
  all_reduce(data, count, reduction, num_averaged);
}

void InterStage::reduce_scatter(const std::vector<Region>& regions, int host, std::byte* output,
                                const Reduction& reduction, int num_averaged) {
  std::vector<std::byte> sums;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    sums.resize(std::max(sums.size(), regions[i].bytes));
    copy_bytes(sums.data(), regions[i].data, regions[i].bytes);
    const std::size_t count = regions[i].bytes / element_bytes(reduction.dtype);
    all_reduce(sums.data(), count, reduction, num_averaged);
    if (static_cast<int>(i) == host) copy_bytes(output, sums.data(), regions[i].bytes);
  }
}

}  // namespace libddp
