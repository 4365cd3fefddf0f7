#pragma once

// Element types of stored tensors, under the names that safetensors gives them.
// Thread rule: free functions; any thread.
//
//   stored_element_bytes("BF16");          // 2
//   stored_element_bytes("F33");           // nothing

#include <cstddef>
#include <optional>
#include <string_view>

namespace libddp {

/// Bytes of an element; nothing for a name that is none.
std::optional<std::size_t> stored_element_bytes(std::string_view dtype);

}  // namespace libddp
