#pragma once

// JSON from files and processes that may be damaged or hostile: the depth, the size and duplicate
// keys are checked while it is read, so that a few bytes cannot take the memory or the stack.
// Thread rule: free functions; any thread.
//
//   const nlohmann::json index = parse_json(text, {.max_bytes = 1u << 20});

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace libddp {

struct JsonLimits {
  std::size_t max_bytes = 64u << 20;
  int max_depth = 32;
};

/// Throws SnapshotError with a clause that says what is wrong ("not JSON: ... at byte 17", "the key
/// 'a' twice"), which callers complete with where.
nlohmann::json parse_json(std::string_view text, const JsonLimits& limits = {});

/// Numbers that JSON does not have (infinity, NaN) come out as null; bytes that are no UTF-8
/// are replaced.
std::string to_text(const nlohmann::json& value);

}  // namespace libddp
