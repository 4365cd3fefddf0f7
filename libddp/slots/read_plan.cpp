#include "libddp/slots/read_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/slots/stored_dtype.h"

namespace libddp {
namespace {

void check_same(const WantedPiece& wanted, const Piece& stored, const std::string& of) {
  if (wanted.dtype == stored.dtype && wanted.shape == stored.shape) return;
  throw ArgumentError(fmt::format(
      "libddp snapshot: {}: '{}' was stored as {} [{}], here it is {} [{}]. Hint: load into the "
      "model and optimizer that were saved.",
      of, printable(wanted.key), stored.dtype, fmt::join(stored.shape, ", "), wanted.dtype,
      fmt::join(wanted.shape, ", ")));
}

class Planner {
 public:
  Planner(const std::vector<const PieceLayout*>& layouts, const std::string& of)
      : layouts_(layouts), of_(of) {
    plan_.segments.resize(layouts.size());
  }

  void add(const WantedPiece& wanted) {
    const std::vector<const Piece*> stored = find(wanted);
    std::int64_t reached = wanted.begin;
    while (reached < wanted.end) {
      std::size_t i = 0;
      while (i < stored.size() && !(stored[i] && has(*stored[i], reached))) ++i;
      if (i == stored.size()) {
        miss(wanted, reached);
        return;
      }
      const std::int64_t end = std::min(wanted.end, stored[i]->end);
      const std::uint64_t element = *stored_element_bytes(stored[i]->dtype);
      const auto bytes = [&](std::int64_t count) {
        return static_cast<std::uint64_t>(count) * element;
      };
      plan_.segments[i].push_back({.offset = stored[i]->offset + bytes(reached - stored[i]->begin),
                                   .bytes = bytes(end - reached),
                                   .to = wanted.to + bytes(reached - wanted.begin)});
      reached = end;
    }
  }

  ReadPlan take() { return std::move(plan_); }

 private:
  static bool has(const Piece& piece, std::int64_t element) {
    return piece.begin <= element && element < piece.end;
  }

  std::vector<const Piece*> find(const WantedPiece& wanted) {
    std::vector<const Piece*> found;
    bool is_there = false;
    for (const PieceLayout* layout : layouts_) {
      found.push_back(layout->find(wanted.key));
      if (!found.back()) continue;
      check_same(wanted, *found.back(), of_);
      is_there = true;
    }
    if (!is_there && wanted.begin == wanted.end) miss(wanted, wanted.begin);
    return found;
  }

  void miss(const WantedPiece& wanted, std::int64_t element) {
    if (!plan_.missing.empty()) return;
    plan_.missing =
        fmt::format("elements {} to {} of '{}'", element, wanted.end, printable(wanted.key));
  }

  const std::vector<const PieceLayout*>& layouts_;
  const std::string& of_;
  ReadPlan plan_;
};

}  // namespace

ReadPlan plan_read(const std::vector<WantedPiece>& wanted,
                   const std::vector<const PieceLayout*>& layouts, const std::string& of) {
  Planner planner(layouts, of);
  for (const WantedPiece& piece : wanted) planner.add(piece);
  return planner.take();
}

}  // namespace libddp
