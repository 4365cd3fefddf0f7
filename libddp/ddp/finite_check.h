#pragma once

// Gradients that are NaN or infinite, found before they reach the other ranks.
//
// Off unless LIBDDP_NAN_CHECK=raise: it reads every gradient once more, and on a device it waits
// for each bucket before that is sent.
// Thread rule: any thread, on gradients that nobody writes.
//
//   if (const auto index = first_non_finite(buckets, bucket)) refuse(parameters[*index].name);

#include <cstddef>
#include <optional>

#include "libddp/ddp/gradient_buckets.h"

namespace libddp {

/// LIBDDP_NAN_CHECK: raise, or off (default). Throws ArgumentError.
bool checks_gradients();

/// Index of the first parameter of the bucket whose gradient has an element that is not finite.
std::optional<std::size_t> first_non_finite(const GradientBuckets& buckets, std::size_t bucket);

}  // namespace libddp
