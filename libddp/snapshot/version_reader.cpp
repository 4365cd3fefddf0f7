#include "libddp/snapshot/version_reader.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/group/expanded.h"
#include "libddp/slots/scatter.h"

namespace libddp {
namespace {

/// To the bit: a NaN is what it is.
bool are_same(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

}  // namespace

VersionReader::VersionReader(const SavedVersion& version,
                             const std::vector<SnapshotTensor>& tensors)
    : version_(version) {
  for (const SnapshotTensor& each : tensors) {
    if (!version.pieces().contains(each.key)) {
      throw ArgumentError(fmt::format(
          "libddp snapshot: {} has no '{}'. Hint: load into the model and optimizer that "
          "were saved.",
          version.name(), printable(each.key)));
    }
    add(each);
  }
  std::vector<const PieceLayout*> layouts;
  for (const auto& source : version.sources()) layouts.push_back(&source->layout());
  plan_ = plan_read(wanted_, layouts, version.name());
}

void VersionReader::add(const SnapshotTensor& each) {
  each.check();
  const at::Tensor tensor = each.tensor.detach();
  const bool is_plain = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  const at::Tensor plain = is_plain ? tensor
                                    : at::empty_like(tensor, tensor.options().device(at::kCPU),
                                                     at::MemoryFormat::Contiguous);
  if (!is_plain) copies_.push_back({.key = each.key, .tensor = tensor, .plain = plain});
  auto* const to =
      plain.is_cpu() ? static_cast<std::byte*>(plain.mutable_data_ptr()) : on_devices_.add(plain);
  wanted_.push_back({.key = each.key,
                     .dtype = std::string(stored_dtype(tensor.scalar_type())),
                     .shape = each.shape,
                     .begin = each.begin,
                     .end = each.end,
                     .to = to});
}

void VersionReader::run(int num_threads) {
  if (!missing().empty()) {
    throw SnapshotError(
        fmt::format("libddp snapshot: {} has {} not here.", version_.name(), missing()));
  }
  on_devices_.begin();
  for (std::size_t i = 0; i < version_.sources().size(); ++i) {
    scatter(*version_.sources()[i], plan_.segments[i], num_threads, &on_devices_);
  }
  on_devices_.finish();
  for (const Copy& each : copies_) finish(each);
}

void VersionReader::finish(const Copy& copy) {
  const at::Tensor to = without_repeats(copy.tensor, copy.tensor);
  const at::Tensor values = without_repeats(copy.plain, copy.tensor);
  if (to.numel() < copy.tensor.numel() && !are_same(values.expand_as(copy.plain), copy.plain)) {
    throw ArgumentError(fmt::format(
        "libddp snapshot: '{}' is expanded, several of its elements are one in memory, and the "
        "save has different values for them. Hint: load into a copy of its own (clone()).",
        printable(copy.key)));
  }
  to.copy_(values);
}

}  // namespace libddp
