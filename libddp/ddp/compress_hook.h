#pragma once

// A communication hook that averages gradients in a 16-bit dtype: half the bytes, at the price of
// one rounding. Sums are formed in fp32 (the collectives' rule for bf16 and fp16).
// Thread rule: as Reducer.
//
//   model.replica().register_comm_hook(compress_hook(group, at::kBFloat16));

#include <c10/core/ScalarType.h>

#include <memory>

#include "libddp/group/process_group.h"

namespace c10d {
class CommHookInterface;
}

namespace libddp {

/// REQUIRES: `dtype` is kHalf or kBFloat16; throws ArgumentError for another one.
std::shared_ptr<c10d::CommHookInterface> compress_hook(Group group, c10::ScalarType dtype);

/// Whether it is one of `compress_hook`: which gradients lie together means nothing to it.
bool is_compress_hook(const c10d::CommHookInterface& hook);

/// A hook that does in `group` what `hook` does in another: a new one of `compress_hook`. Others
/// are as they are, and know their group themselves.
std::shared_ptr<c10d::CommHookInterface> over_group(
    const std::shared_ptr<c10d::CommHookInterface>& hook, Group group);

}  // namespace libddp
