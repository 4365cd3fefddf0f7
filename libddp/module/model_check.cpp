#include "libddp/module/model_check.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "libddp/base/error.h"
#include "libddp/base/fnv.h"
#include "libddp/base/group_identity.h"

namespace libddp {
namespace {

/// The end of a line counts, so that lines cannot slide into each other.
std::int64_t hash_of(const std::vector<std::string>& lines) {
  std::uint64_t hash = kFnvBegin;
  for (const std::string& line : lines) hash = fnv1a("\n", fnv1a(line, hash));
  return static_cast<std::int64_t>(hash);
}

/// The value of every rank.
std::vector<std::int64_t> gather(ProcessGroup& group, std::int64_t value, std::string_view label) {
  at::Tensor mine = at::empty({1}, at::kLong);
  *mine.mutable_data_ptr<std::int64_t>() = value;
  at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather_into(all, mine, {.async = false, .timeout = {}, .label = label});
  const auto* const data = all.const_data_ptr<std::int64_t>();
  return {data, data + group.size()};
}

/// The text of every rank.
std::vector<std::string> gather(ProcessGroup& group, const std::string& text) {
  const std::vector<std::int64_t> lengths =
      gather(group, static_cast<std::int64_t>(text.size()), "model description");
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  at::Tensor mine = at::empty({longest}, at::kByte);
  std::memset(mine.data_ptr(), 0, mine.nbytes());
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  at::Tensor all = at::empty({longest * group.size()}, at::kByte);
  group.all_gather_into(all, mine, {.async = false, .timeout = {}, .label = "model description"});
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* const begin = static_cast<const char*>(all.const_data_ptr()) + rank * longest;
    texts.emplace_back(begin, static_cast<std::size_t>(lengths[rank]));
  }
  return texts;
}

/// Begins what a rank sends that has a problem instead of a model.
constexpr char kProblemMark = '\1';

/// "rank 1: ..." for the first rank that has one; empty if none has.
std::string first_problem(const std::vector<std::string>& texts) {
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with(kProblemMark)) {
      return fmt::format("rank {}: {}", rank, texts[rank].substr(1));
    }
  }
  return {};
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// "rank 2 has ..., rank 0 has ...": the first line in which some rank differs from rank 0.
std::string first_difference(const std::vector<std::string>& texts) {
  const std::vector<std::string> first = split_lines(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const std::vector<std::string> lines = split_lines(texts[rank]);
    for (std::size_t i = 0; i < std::max(first.size(), lines.size()); ++i) {
      const std::string mine = i < lines.size() ? lines[i] : "nothing more";
      const std::string theirs = i < first.size() ? first[i] : "nothing more";
      if (mine != theirs) return fmt::format("rank {} has {}, rank 0 has {}", rank, mine, theirs);
    }
  }
  return "the descriptions are equal, their hashes are not";
}

}  // namespace

std::vector<std::string> describe_model(const NamedTensors& parameters, const NamedTensors& buffers,
                                        const std::string& options,
                                        const std::vector<std::string>& sparse) {
  std::vector<std::string> lines;
  const auto add = [&](const char* kind, const NamedTensor& t, const std::string& end) {
    const c10::Device device = t.tensor.device();
    lines.push_back(
        fmt::format("{} '{}' {} [{}]{}{}", kind, t.name, c10::toString(t.tensor.scalar_type()),
                    fmt::join(t.tensor.sizes(), ", "), end,
                    device.is_cpu() ? "" : " on " + c10::DeviceTypeName(device.type(), true)));
  };
  for (const NamedTensor& p : parameters) {
    const bool is_sparse = std::find(sparse.begin(), sparse.end(), p.name) != sparse.end();
    add("parameter", p,
        fmt::format(" requires_grad={}{}", p.tensor.requires_grad(),
                    is_sparse ? " with sparse gradients" : ""));
  }
  for (const NamedTensor& b : buffers) add("buffer", b, "");
  lines.push_back("options " + options);
  return lines;
}

void check_model(ProcessGroup& group, const std::string& what,
                 const std::vector<std::string>& lines, const std::string& problem) {
  std::string text = problem.empty() ? "" : kProblemMark + problem;
  if (problem.empty()) {
    for (const std::string& line : lines) text += line + '\n';
  }
  const auto refuse_own = [&] {
    if (!problem.empty()) throw ArgumentError(problem);
  };
  if (group.size() == 1) return refuse_own();
  const std::vector<std::int64_t> hashes = gather(group, hash_of({text}), "model hash");
  const auto differs = [&](std::int64_t hash) { return hash != hashes[0]; };
  if (std::none_of(hashes.begin(), hashes.end(), differs)) return refuse_own();
  const std::vector<std::string> texts = gather(group, text);
  refuse_own();
  const GroupIdentity me{group.name(), group.rank(), group.size()};
  if (const std::string theirs = first_problem(texts); !theirs.empty()) {
    throw ArgumentError(fmt::format("{} {}: {}", me.where(), what, theirs));
  }
  throw ArgumentError(
      fmt::format("{} {}: the ranks wrap different models: {}. Hint: build the model from the same "
                  "configuration, and pass the same arguments, on every rank.",
                  me.where(), what, first_difference(texts)));
}

}  // namespace libddp
