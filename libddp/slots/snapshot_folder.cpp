#include "libddp/slots/snapshot_folder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "libddp/base/check.h"
#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/printable.h"
#include "libddp/base/system_error.h"
#include "libddp/slots/fresh_file.h"
#include "libddp/slots/saved_name.h"

namespace libddp {
namespace {

constexpr const char* kIndex = "index.json";
constexpr const char* kPart = ".part";

[[noreturn]] void refuse_folder(const std::string& path, const std::string& why) {
  throw SnapshotError(fmt::format(
      "libddp snapshot: {}: {}. Hint: look at the folder, its disk and its permissions.",
      printable(path), why));
}

/// What a folder's name says; nothing for names that are not ours.
struct Name {
  SavedStep saved;
  /// Empty for a snapshot that is whole.
  std::string start;
};

std::optional<Name> parse_name(const std::string& text) {
  NameReader name(text);
  const auto saved = name.saved_step();
  if (!saved) return std::nullopt;
  if (name.is_over()) return Name{*saved, ""};
  if (!name.skip(".")) return std::nullopt;
  const std::string_view start = name.word();
  if (start.empty() || !name.skip(kPart) || !name.is_over()) return std::nullopt;
  return Name{*saved, std::string(start)};
}

/// Ours in a folder, with their paths; by sequence, the newest first.
std::vector<std::pair<Name, std::string>> names_in(const std::string& path) {
  std::vector<std::pair<Name, std::string>> found;
  std::vector<std::string> names;
  const int error = list_names(path, names);
  if (error != 0 && error != ENOENT) refuse_folder(path, errno_text("opendir", error));
  for (const std::string& text : names) {
    if (auto name = parse_name(text)) found.emplace_back(*name, path + "/" + text);
  }
  std::sort(found.begin(), found.end(), [](const auto& one, const auto& other) {
    return one.first.saved.sequence > other.first.saved.sequence;
  });
  return found;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), {});
  if (!file || file.bad()) refuse_folder(path, errno_text("read", errno));
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  FreshFile file(path);
  file.reserve(text.size());
  file.append(std::as_bytes(std::span(text)), /*stays=*/false);
  file.put_in_place();
}

std::string rank_path(const std::string& folder, int rank) {
  return fmt::format("{}/rank-{}.json", folder, rank);
}

void remove(const std::string& path) {
  if (const int error = remove_tree(path)) refuse_folder(path, errno_text("unlink", error));
}

}  // namespace

SnapshotFolder::SnapshotFolder(std::string path) : path_(std::move(path)) {}

std::vector<SnapshotStore::Entry> SnapshotFolder::list() const {
  std::vector<Entry> entries;
  for (const auto& [name, path] : names_in(path_)) {
    if (name.start.empty()) entries.push_back({.saved = name.saved, .path = path});
  }
  return entries;
}

std::vector<SnapshotStore::Part> SnapshotFolder::unfinished() const {
  std::vector<Part> parts;
  for (const auto& [name, path] : names_in(path_)) {
    if (!name.start.empty()) {
      parts.push_back({.saved = name.saved, .start = name.start, .path = path});
    }
  }
  return parts;
}

SnapshotIndex SnapshotFolder::read(const Entry& entry) const {
  const std::string path = entry.path + "/" + kIndex;
  try {
    SnapshotIndex index = SnapshotIndex::decode(text_of_file(path));
    if (index.saved != entry.saved) throw SnapshotError("it is of another snapshot");
    return index;
  } catch (const SnapshotError& error) {
    const std::string what = error.what();
    if (what.find(path) != std::string::npos) throw;
    refuse_folder(path, what);
  }
}

FileSource SnapshotFolder::open(const Entry& entry, const StoredRank& rank) const {
  return {entry.path + "/" + rank.file, rank.stored};
}

void SnapshotFolder::add_rank(const SavedStep& saved, const std::string& start, int rank,
                              int world_size, const ChunkSource& source,
                              const std::string& values) {
  const std::string folder = part_path(saved, start);
  if (const int error = make_folders(folder)) refuse_folder(folder, errno_text("mkdir", error));
  sync_folder(path_);
  StoredRank stored{.rank = rank,
                    .file = fmt::format("rank-{}-of-{}.safetensors", rank, world_size),
                    .stored = {},
                    .values = values};
  stored.stored = write_stored_file(folder + "/" + stored.file, source);
  write_text(rank_path(folder, rank), stored.encode());
}

std::vector<int> SnapshotFolder::missing_ranks(const SavedStep& saved, const std::string& start,
                                               int world_size) const {
  const std::string folder = part_path(saved, start);
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (::access(rank_path(folder, rank).c_str(), F_OK) != 0) missing.push_back(rank);
  }
  return missing;
}

SnapshotStore::Entry SnapshotFolder::commit(const SavedStep& saved, const std::string& start,
                                            int world_size) {
  const std::string folder = part_path(saved, start);
  SnapshotIndex index{.saved = as_stored(saved), .ranks = {}, .world_size = world_size};
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string path = rank_path(folder, rank);
    try {
      index.ranks.push_back(StoredRank::decode(text_of_file(path)));
    } catch (const SnapshotError& error) {
      refuse_folder(path, error.what());
    }
  }
  write_text(folder + "/" + kIndex, index.encode());
  for (int rank = 0; rank < world_size; ++rank) {
    if (::unlink(rank_path(folder, rank).c_str()) != 0)
      refuse_folder(folder, errno_text("unlink", errno));
  }
  sync_folder(folder);
  Entry entry{.saved = as_stored(saved), .path = path_ + "/" + name_of(saved)};
  if (::rename(folder.c_str(), entry.path.c_str()) != 0) {
    refuse_folder(entry.path, errno_text("rename", errno));
  }
  sync_folder(path_);
  return entry;
}

void SnapshotFolder::keep_newest(int count, const std::string& start) {
  LIBDDP_CHECK(count > 0, "a folder that keeps nothing");
  const std::vector<Entry> entries = list();
  for (std::size_t i = static_cast<std::size_t>(count); i < entries.size(); ++i) {
    // First it loses its name: half of a snapshot is none.
    const std::string gone = entries[i].path + ".old" + kPart;
    if (::rename(entries[i].path.c_str(), gone.c_str()) != 0) {
      refuse_folder(entries[i].path, errno_text("rename", errno));
    }
  }
  for (const Part& part : unfinished()) {
    const bool is_behind = !entries.empty() && part.saved.sequence <= entries[0].saved.sequence;
    if (is_behind || part.start != start) remove(part.path);
  }
}

std::string SnapshotFolder::part_path(const SavedStep& saved, const std::string& start) const {
  return fmt::format("{}/{}.{}{}", path_, name_of(saved), start, kPart);
}

}  // namespace libddp
