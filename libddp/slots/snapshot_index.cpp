#include "libddp/slots/snapshot_index.h"

#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/build_info.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/kernels/crc32c.h"
#include "libddp/slots/json_text.h"

namespace libddp {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "libddp-snapshot";
/// 1 was that of Python's save_snapshot: an index without checksums.
constexpr int kIndexVersion = 2;
constexpr const char* kSum = "crc32c";

template <typename T>
T number(const json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end() || !found->is_number_integer()) {
    throw SnapshotError(fmt::format("'{}' is missing, or no number", name));
  }
  const bool fits =
      found->is_number_unsigned()
          ? found->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<T>::max())
          : std::is_signed_v<T> && found->get<std::int64_t>() >=
                                       static_cast<std::int64_t>(std::numeric_limits<T>::min());
  if (!fits) throw SnapshotError(fmt::format("'{}' is out of range", name));
  return found->get<T>();
}

const json& member(const json& object, const char* name, json::value_t type) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end() || found->type() != type) {
    throw SnapshotError(fmt::format("'{}' is missing, or of another type", name));
  }
  return *found;
}

/// A name in the folder, not a way out of it.
std::string file_name(const json& object) {
  const auto name = member(object, "file", json::value_t::string).get<std::string>();
  if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..") {
    throw SnapshotError(fmt::format("'{}' is no name of a file", printable(name)));
  }
  return name;
}

json to_json(const StoredRank& rank) {
  return {{"rank", rank.rank},
          {"file", rank.file},
          {"bytes", rank.stored.bytes},
          {"header_crc32c", rank.stored.header_sum},
          {"chunk_crc32c", rank.stored.chunk_sums},
          {"values", parse_json(rank.values)}};
}

StoredRank rank_of(const json& object) {
  StoredRank rank{.rank = number<int>(object, "rank"), .file = file_name(object), .stored = {}};
  if (rank.rank < 0) throw SnapshotError("a rank is negative");
  rank.stored.bytes = number<std::uint64_t>(object, "bytes");
  rank.stored.header_sum = number<std::uint32_t>(object, "header_crc32c");
  for (const json& sum : member(object, "chunk_crc32c", json::value_t::array)) {
    rank.stored.chunk_sums.push_back(number<std::uint32_t>({{"sum", sum}}, "sum"));
  }
  if (!object.contains("values")) throw SnapshotError("'values' is missing");
  rank.values = to_text(object["values"]);
  return rank;
}

/// Of an object's text, without the member that holds it: text has one form (to_text), so what a
/// flipped bit makes of it has another one, or the same meaning.
std::uint32_t sum_of(const json& object) {
  const std::string text = to_text(object);
  return crc32c(text.data(), text.size());
}

std::string sealed(json object) {
  const std::uint32_t sum = sum_of(object);
  object[kSum] = sum;
  return to_text(object);
}

json unsealed(json object) {
  const auto sum = number<std::uint32_t>(object, kSum);
  object.erase(kSum);
  if (sum != sum_of(object)) {
    throw SnapshotError("its checksum is another one: it was damaged, or written by hand");
  }
  return object;
}

}  // namespace

std::string StoredRank::encode() const { return sealed(to_json(*this)); }

StoredRank StoredRank::decode(std::string_view text) { return rank_of(unsealed(parse_json(text))); }

std::string SnapshotIndex::encode() const {
  json all = json::array();
  for (const StoredRank& rank : ranks) all.push_back(to_json(rank));
  return sealed({{"format", kFormat},
                 {"version", kIndexVersion},
                 {"libddp", version()},
                 {"step", saved.step},
                 {"sequence", saved.sequence},
                 {"world_size", world_size},
                 {"ranks", std::move(all)}});
}

SnapshotIndex SnapshotIndex::decode(std::string_view text) {
  json document = parse_json(text);
  if (member(document, "format", json::value_t::string) != kFormat) {
    throw SnapshotError("it is no index of a snapshot");
  }
  if (const auto version = number<int>(document, "version"); version != kIndexVersion) {
    throw SnapshotError(
        fmt::format("it is of version {}, this is version {}", version, kIndexVersion));
  }
  document = unsealed(std::move(document));
  SnapshotIndex index;
  index.saved = {.step = number<std::int64_t>(document, "step"),
                 .sequence = number<std::uint64_t>(document, "sequence")};
  index.world_size = number<int>(document, "world_size");
  int before = -1;
  for (const json& rank : member(document, "ranks", json::value_t::array)) {
    index.ranks.push_back(rank_of(rank));
    const int current = index.ranks.back().rank;
    if (current <= before || current >= index.world_size) {
      throw SnapshotError(
          fmt::format("rank {} of {} where it does not belong", current, index.world_size));
    }
    before = current;
  }
  return index;
}

}  // namespace libddp
