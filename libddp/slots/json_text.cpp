#include "libddp/slots/json_text.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {
namespace {

using nlohmann::json;

/// Builds the value, with a limit to the depth and an eye on the keys of each object.
class Builder : public nlohmann::json_sax<json> {
 public:
  explicit Builder(int max_depth) : max_depth_(max_depth) {}

  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& value) override {
    if (open_.back()->contains(value)) {
      throw SnapshotError(fmt::format("the key '{}' twice", printable(value)));
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    throw SnapshotError(
        fmt::format("not JSON: {} (at byte {})", printable(error.what()), position));
  }

 private:
  bool add(json value) {
    place(std::move(value));
    return true;
  }

  bool open(json value) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      throw SnapshotError(fmt::format("JSON deeper than {} levels", max_depth_));
    }
    open_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }

  const int max_depth_;
  json root_;
  /// Objects and arrays that are not closed yet. Only the innermost grows, so the others stay where
  /// they are.
  std::vector<json*> open_;
  std::string key_;
};

}  // namespace

nlohmann::json parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    throw SnapshotError(
        fmt::format("JSON of {} bytes, at most {} are read", text.size(), limits.max_bytes));
  }
  Builder builder(limits.max_depth);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string to_text(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace libddp
