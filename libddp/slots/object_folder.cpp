#include "libddp/slots/object_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/base/random.h"
#include "libddp/slots/run_file.h"
#include "libddp/slots/saved_name.h"

namespace libddp {
namespace {

constexpr std::size_t kMostRankDigits = 9;
constexpr std::size_t kLongestStart = 64;
constexpr const char* kIndexObject = "index.json";
/// As JsonLimits has it: more is no index.
constexpr std::uint64_t kMaxTextBytes = 64u << 20;
/// More than a connection and less than the memory: chunks that are on their way at once.
constexpr int kReadersAtOnce = 8;

/// What lies under the name of one save.
struct Found {
  SavedStep saved;
  bool has_index = false;
  /// Whole names, with the start that has written them.
  std::map<std::string, std::string> files;
};

std::string prefix_of(const SavedStep& saved) { return name_of(saved) + '/'; }

std::string part_name(const SavedStep& saved, const std::string& start, int rank) {
  return fmt::format("{}rank-{}.{}.json", prefix_of(saved), rank, start);
}

/// The start in "rank-0-of-2.ab3f.safetensors" and "rank-0.ab3f.json"; "" in other names.
std::string_view start_in(NameReader file) {
  if (!file.skip("rank-") || !file.number(kMostRankDigits)) return "";
  if (file.skip("-of-") && !file.number(kMostRankDigits)) return "";
  if (!file.skip(".")) return "";
  const std::string_view start = file.word();
  const bool is_ours = file.skip(".json") || file.skip(".safetensors");
  return is_ours && file.is_over() && start.size() <= kLongestStart ? start : "";
}

/// By sequence, the newest first. Names that are not ours are left alone.
std::vector<Found> find_saves(const std::vector<std::string>& names) {
  std::map<std::pair<std::uint64_t, std::int64_t>, Found> found;
  for (const std::string& text : names) {
    NameReader name(text);
    const auto saved = name.saved_step();
    if (!saved || !name.skip("/")) continue;
    const std::string_view start = start_in(name);
    const bool is_index = name.skip(kIndexObject) && name.is_over();
    if (!is_index && start.empty()) continue;
    Found& each = found[{saved->sequence, saved->step}];
    each.saved = *saved;
    if (is_index) {
      each.has_index = true;
    } else {
      each.files.emplace(text, start);
    }
  }
  std::vector<Found> all;
  for (auto entry = found.rbegin(); entry != found.rend(); ++entry) {
    all.push_back(std::move(entry->second));
  }
  return all;
}

/// Its chunks come over a wire: several at once.
class ObjectSource final : public StoredSource {
 public:
  using StoredSource::StoredSource;
  int num_readers(int num_cores) const override { return std::max(num_cores, kReadersAtOnce); }
};

}  // namespace

ObjectFolder::ObjectFolder(std::shared_ptr<ObjectStore> objects) : objects_(std::move(objects)) {}

std::vector<SnapshotStore::Entry> ObjectFolder::list() const {
  std::vector<Entry> entries;
  for (const Found& each : find_saves(objects_->list())) {
    if (!each.has_index) continue;
    entries.push_back({.saved = each.saved, .path = path_of(each.saved)});
  }
  return entries;
}

std::vector<SnapshotStore::Part> ObjectFolder::unfinished() const {
  std::vector<Part> parts;
  for (const Found& each : find_saves(objects_->list())) {
    if (each.has_index) continue;
    std::set<std::string> starts;
    for (const auto& [name, start] : each.files) starts.insert(start);
    for (const std::string& start : starts) {
      parts.push_back({.saved = each.saved, .start = start, .path = path_of(each.saved)});
    }
  }
  return parts;
}

SnapshotIndex ObjectFolder::read(const Entry& entry) const {
  const std::string name = prefix_of(entry.saved) + kIndexObject;
  const std::string text = text_of(name);
  try {
    SnapshotIndex index = SnapshotIndex::decode(text);
    if (index.saved != entry.saved) throw SnapshotError("it is of another snapshot");
    return index;
  } catch (const SnapshotError& error) {
    refuse_stored_file(objects_->address() + "/" + name, error.what());
  }
}

std::shared_ptr<const ChunkSource> ObjectFolder::source(const Entry& entry,
                                                        const StoredRank& rank) const {
  const std::string name = prefix_of(entry.saved) + rank.file;
  const std::string path = objects_->address() + "/" + name;
  const auto read = [objects = objects_, name, path](void* to, std::uint64_t bytes,
                                                     std::uint64_t offset) {
    const std::string found = objects->read(name, offset, bytes);
    if (found.size() != bytes) refuse_stored_file(path, "it ends early");
    std::copy(found.begin(), found.end(), static_cast<char*>(to));
  };
  return std::make_shared<ObjectSource>(path, rank.stored, read);
}

std::string ObjectFolder::run(bool may_create) {
  const auto find = [&]() -> std::string {
    const std::vector<std::string> names = objects_->list();
    if (std::find(names.begin(), names.end(), kRunFile) == names.end()) return "";
    return run_in_text(objects_->read(kRunFile, 0, kMaxRunFileBytes),
                       objects_->address() + "/" + kRunFile);
  };
  std::string found = find();
  if (!found.empty() || !may_create) return found;
  objects_->create(kRunFile, random_hex(8) + '\n');
  // Of several that do it at once one wins.
  return find();
}

void ObjectFolder::add_rank(const SavedStep& saved, const std::string& start, int rank,
                            int world_size, const ChunkSource& source, const std::string& values) {
  StoredRank stored{.rank = rank,
                    .file = fmt::format("rank-{}-of-{}.{}.safetensors", rank, world_size, start),
                    .stored = {},
                    .values = values};
  const std::string name = prefix_of(saved) + stored.file;
  objects_->write(name, source.layout().data_bytes(), [&](const ObjectStore::Append& append) {
    stored.stored = send_stored(objects_->address() + "/" + name, source,
                                [&](std::span<const std::byte> bytes, bool) { append(bytes); });
  });
  write_text(part_name(saved, start, rank), stored.encode());
}

std::vector<int> ObjectFolder::missing_ranks(const SavedStep& saved, const std::string& start,
                                             int world_size) const {
  const std::vector<std::string> names = objects_->list();
  const std::set<std::string> there(names.begin(), names.end());
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!there.contains(part_name(saved, start, rank))) missing.push_back(rank);
  }
  return missing;
}

SnapshotStore::Entry ObjectFolder::commit(const SavedStep& saved, const std::string& start,
                                          int world_size) {
  SnapshotIndex index{.saved = as_stored(saved), .ranks = {}, .world_size = world_size};
  std::vector<std::string> parts;
  for (int rank = 0; rank < world_size; ++rank) {
    parts.push_back(part_name(saved, start, rank));
    const std::string text = text_of(parts.back());
    try {
      index.ranks.push_back(StoredRank::decode(text));
    } catch (const SnapshotError& error) {
      refuse_stored_file(objects_->address() + "/" + parts.back(), error.what());
    }
  }
  write_text(prefix_of(saved) + kIndexObject, index.encode());
  objects_->remove(parts);
  return {.saved = as_stored(saved), .path = path_of(saved)};
}

void ObjectFolder::keep_newest(int count, const std::string& start) {
  LIBDDP_CHECK(count > 0, "a folder that keeps nothing");
  std::vector<std::string> indices;
  std::vector<std::string> files;
  int num_whole = 0;
  for (const Found& each : find_saves(objects_->list())) {
    // What is newer than the newest snapshot, and of this start, is being written.
    const bool is_kept = each.has_index ? ++num_whole <= count : num_whole == 0;
    // A snapshot that stays may have been written by another start: its index says so.
    if (each.has_index && is_kept) continue;
    if (each.has_index) indices.push_back(prefix_of(each.saved) + kIndexObject);
    for (const auto& [name, of_start] : each.files) {
      if (!is_kept || of_start != start) files.push_back(name);
    }
  }
  // First they lose their index: half of a snapshot is none.
  if (!indices.empty()) objects_->remove(indices);
  if (!files.empty()) objects_->remove(files);
}

std::string ObjectFolder::path_of(const SavedStep& saved) const {
  return objects_->address() + '/' + name_of(saved);
}

std::string ObjectFolder::text_of(const std::string& name) const {
  std::string text = objects_->read(name, 0, kMaxTextBytes + 1);
  if (text.size() > kMaxTextBytes) {
    refuse_stored_file(objects_->address() + "/" + name, "it is too long");
  }
  return text;
}

void ObjectFolder::write_text(const std::string& name, const std::string& text) {
  objects_->write(name, text.size(), [&](const ObjectStore::Append& append) {
    append(std::as_bytes(std::span(text)));
  });
}

}  // namespace libddp
