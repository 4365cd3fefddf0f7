#include "libddp/slots/stored_dtype.h"

#include <array>

namespace libddp {
namespace {

struct Entry {
  std::string_view name;
  std::size_t bytes;
};

constexpr std::array kEntries{
    Entry{"F64", 8},     Entry{"F32", 4},     Entry{"F16", 2},         Entry{"BF16", 2},
    Entry{"F8_E4M3", 1}, Entry{"F8_E5M2", 1}, Entry{"F8_E4M3FNUZ", 1}, Entry{"F8_E5M2FNUZ", 1},
    Entry{"F8_E8M0", 1}, Entry{"C64", 8},     Entry{"C128", 16},       Entry{"C32", 4},
    Entry{"I64", 8},     Entry{"I32", 4},     Entry{"I16", 2},         Entry{"I8", 1},
    Entry{"U64", 8},     Entry{"U32", 4},     Entry{"U16", 2},         Entry{"U8", 1},
    Entry{"BOOL", 1},
};

}  // namespace

std::optional<std::size_t> stored_element_bytes(std::string_view dtype) {
  for (const Entry& entry : kEntries) {
    if (entry.name == dtype) return entry.bytes;
  }
  return std::nullopt;
}

}  // namespace libddp
