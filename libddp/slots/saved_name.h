#pragma once

// How a snapshot is called where it is stored: "step-700.12" for the twelfth save, of step 700. And
// what takes such names apart.
//
// By hand, without <regex>: its templates have other layouts from one compiler to the next, and in
// a process the loader joins those of the application, of torch and of libddp.
// Thread rule: values.
//
//   NameReader name("step-700.12.ab3f.part");
//   const std::optional<SavedStep> saved = name.saved_step();   // 700, 12
//   if (saved && name.skip(".")) start = name.word();           // "ab3f"
//   is_ours = name.skip(".part") && name.is_over();

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "libddp/slots/slot.h"

namespace libddp {

std::string name_of(const SavedStep& saved);
/// What such a name says: not the start.
SavedStep as_stored(const SavedStep& saved);

class NameReader {
 public:
  explicit NameReader(std::string_view name) : left_(name) {}

  /// Whether `text` came next; it is behind then.
  bool skip(std::string_view text);
  /// What name_of gives; nothing where something else comes next.
  std::optional<SavedStep> saved_step();
  /// Decimal digits, `most` of them at most; nothing where none come next, or more.
  std::optional<std::int64_t> number(std::size_t most);
  /// ASCII letters and digits; "" where none come next.
  std::string_view word();
  bool is_over() const { return left_.empty(); }

 private:
  template <typename Belongs>
  std::string_view take_while(Belongs belongs);

  std::string_view left_;
};

}  // namespace libddp
