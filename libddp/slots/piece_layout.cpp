#include "libddp/slots/piece_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/slots/json_text.h"
#include "libddp/slots/stored_dtype.h"

namespace libddp {
namespace {

using nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
/// Its value is JSON in a text, as safetensors allows texts only.
constexpr const char* kParts = "libddp.parts";

/// What is wrong with a piece; empty if nothing is.
std::string problem_of(const Piece& piece) {
  if (piece.key == kMetadata) return "is safetensors's own key";
  const auto element_bytes = stored_element_bytes(piece.dtype);
  if (!element_bytes) return fmt::format("has the unknown dtype '{}'", printable(piece.dtype));
  const std::int64_t numel = numel_of(piece.shape);
  if (numel < 0) return fmt::format("has the shape [{}]", fmt::join(piece.shape, ", "));
  if (piece.begin < 0 || piece.end < piece.begin || piece.end > numel) {
    return fmt::format("has the elements {} to {} of {}", piece.begin, piece.end, numel);
  }
  const auto count = static_cast<std::uint64_t>(piece.end - piece.begin);
  if (count > std::numeric_limits<std::int64_t>::max() / *element_bytes) return "is too large";
  return "";
}

bool is_whole(const Piece& piece) { return piece.begin == 0 && piece.end == numel_of(piece.shape); }

std::uint64_t bytes_of(const Piece& piece) {
  return static_cast<std::uint64_t>(piece.end - piece.begin) * *stored_element_bytes(piece.dtype);
}

const json& member(const json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end()) {
    throw SnapshotError(fmt::format("'{}' is missing", name));
  }
  return *found;
}

std::uint64_t whole_number(const json& value) {
  if (!value.is_number_unsigned()) {
    throw SnapshotError(fmt::format("{} where a size belongs", to_text(value).substr(0, 40)));
  }
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    throw SnapshotError(fmt::format("the size {} is too large", number));
  }
  return number;
}

std::vector<std::int64_t> shape_of(const json& value) {
  if (!value.is_array() || value.size() > 64) throw SnapshotError("a shape is no list of sizes");
  std::vector<std::int64_t> shape;
  for (const json& size : value) shape.push_back(static_cast<std::int64_t>(whole_number(size)));
  return shape;
}

/// The whole tensors of the pieces that are parts, by key.
json parts_of(const json& document) {
  const auto metadata = document.find(kMetadata);
  if (metadata == document.end()) return json::object();
  if (!metadata->is_object()) throw SnapshotError(fmt::format("'{}' is no object", kMetadata));
  const auto parts = metadata->find(kParts);
  if (parts == metadata->end()) return json::object();
  if (!parts->is_string()) throw SnapshotError(fmt::format("'{}' is no text", kParts));
  json found = parse_json(parts->get_ref<const std::string&>());
  if (!found.is_object()) throw SnapshotError(fmt::format("'{}' is no object", kParts));
  return found;
}

Piece piece_of(const std::string& key, const json& entry, const json& parts) {
  const json& dtype = member(entry, "dtype");
  if (!dtype.is_string()) throw SnapshotError("the dtype is no text");
  Piece piece{.key = key, .dtype = dtype.get<std::string>(), .shape = {}};
  piece.shape = shape_of(member(entry, "shape"));
  piece.end = numel_of(piece.shape);
  if (const auto part = parts.find(key); part != parts.end()) {
    const std::int64_t count = piece.end;
    piece.shape = shape_of(member(*part, "shape"));
    piece.begin = static_cast<std::int64_t>(whole_number(member(*part, "begin")));
    if (count < 0 || piece.begin > std::numeric_limits<std::int64_t>::max() - count) {
      throw SnapshotError("its part is too large");
    }
    piece.end = piece.begin + count;
  }
  const json& offsets = member(entry, "data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) {
    throw SnapshotError("'data_offsets' are not two");
  }
  piece.offset = whole_number(offsets[0]);
  const std::uint64_t end = whole_number(offsets[1]);
  if (end < piece.offset) throw SnapshotError("'data_offsets' run backwards");
  piece.bytes = end - piece.offset;
  if (const std::string problem = problem_of(piece); !problem.empty()) {
    throw SnapshotError(problem);
  }
  if (piece.bytes != bytes_of(piece)) {
    throw SnapshotError(
        fmt::format("has {} bytes, its shape says {}", piece.bytes, bytes_of(piece)));
  }
  return piece;
}

}  // namespace

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel)) return -1;
  }
  return numel;
}

PieceLayout PieceLayout::of(std::vector<Piece> pieces) {
  for (const Piece& piece : pieces) {
    if (const std::string problem = problem_of(piece); !problem.empty()) {
      throw ArgumentError(
          fmt::format("libddp snapshot: '{}' {}. Hint: save it under another key "
                      "or in another form.",
                      printable(piece.key), problem));
    }
  }
  PieceLayout layout;
  layout.pieces_ = std::move(pieces);
  layout.place();
  layout.index();
  if (layout.by_key_.size() != layout.pieces_.size()) {
    throw ArgumentError(
        fmt::format("libddp snapshot: two tensors have the key '{}'. Hint: keys must differ.",
                    printable(layout.first_double())));
  }
  return layout;
}

std::string PieceLayout::first_double() const {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (by_key_.at(pieces_[i].key) != i) return pieces_[i].key;
  }
  return {};
}

void PieceLayout::place() {
  const auto element_bytes = [](const Piece& piece) { return *stored_element_bytes(piece.dtype); };
  std::stable_sort(pieces_.begin(), pieces_.end(), [&](const Piece& one, const Piece& other) {
    return element_bytes(one) > element_bytes(other);
  });
  json document = json::object();
  json parts = json::object();
  for (Piece& piece : pieces_) {
    piece.offset = data_bytes_;
    piece.bytes = bytes_of(piece);
    if (__builtin_add_overflow(data_bytes_, piece.bytes, &data_bytes_)) {
      throw ArgumentError("libddp snapshot: the tensors have more bytes than 64 bits count.");
    }
    json shape = piece.shape;
    if (!is_whole(piece)) {
      parts[piece.key] = {{"shape", piece.shape}, {"begin", piece.begin}};
      shape = {piece.end - piece.begin};
    }
    document[piece.key] = {{"dtype", piece.dtype},
                           {"shape", std::move(shape)},
                           {"data_offsets", {piece.offset, piece.offset + piece.bytes}}};
  }
  document[kMetadata] = {{kParts, to_text(parts)}};
  text_ = to_text(document);
  // safetensors aligns its data to 8 bytes by spaces.
  text_.append((8 - text_.size() % 8) % 8, ' ');
}

void PieceLayout::index() {
  for (std::size_t i = 0; i < pieces_.size(); ++i) by_key_.emplace(pieces_[i].key, i);
}

PieceLayout PieceLayout::parse(std::string_view text) {
  const json document = parse_json(text, {.max_bytes = kMaxTextBytes});
  if (!document.is_object()) throw SnapshotError("the layout is no object");
  const json parts = parts_of(document);
  PieceLayout layout;
  for (const auto& [key, entry] : document.items()) {
    if (key == kMetadata) continue;
    try {
      layout.pieces_.push_back(piece_of(key, entry, parts));
    } catch (const SnapshotError& error) {
      throw SnapshotError(fmt::format("'{}': {}", printable(key), error.what()));
    }
  }
  const auto by_offset = [](const Piece& one, const Piece& other) {
    return std::pair(one.offset, one.bytes) < std::pair(other.offset, other.bytes);
  };
  std::sort(layout.pieces_.begin(), layout.pieces_.end(), by_offset);
  for (const Piece& piece : layout.pieces_) {
    if (piece.offset != layout.data_bytes_) {
      throw SnapshotError(fmt::format("'{}' begins at byte {}, not at {}", printable(piece.key),
                                      piece.offset, layout.data_bytes_));
    }
    if (__builtin_add_overflow(layout.data_bytes_, piece.bytes, &layout.data_bytes_)) {
      throw SnapshotError("more bytes than 64 bits count");
    }
  }
  layout.index();
  layout.text_ = text;
  return layout;
}

const Piece* PieceLayout::find(const std::string& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &pieces_[found->second];
}

std::string PieceLayout::describe(std::uint64_t begin, std::uint64_t end) const {
  std::string text;
  int shown = 0;
  for (const Piece& piece : pieces_) {
    if (piece.bytes == 0 || piece.offset >= end || piece.offset + piece.bytes <= begin) continue;
    if (++shown > 3) return text + " and more";
    const std::uint64_t from = std::max(begin, piece.offset) - piece.offset;
    const std::uint64_t to = std::min(end, piece.offset + piece.bytes) - piece.offset;
    text += fmt::format("{}bytes {} to {} of '{}'", shown == 1 ? "" : ", ", from, to,
                        printable(piece.key));
  }
  return text;
}

}  // namespace libddp
