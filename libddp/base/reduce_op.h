#pragma once

// What a reduction does with the elements of all ranks.

#include <cstdint>
#include <string_view>

namespace libddp {

enum class ReduceOp : std::uint8_t { Sum, Avg, Product, Min, Max, Band, Bor, Bxor };

/// torch's spelling: "SUM", "AVG".
std::string_view name(ReduceOp op);

}  // namespace libddp
