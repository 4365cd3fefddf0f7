#include "libddp/ddp/bucket_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace libddp {
namespace {

const char* order_of(const BucketLayout& layout) {
  if (layout.is_rebuilt) return "in the order in which gradients come";
  return layout.is_torchs ? "in the order of the parameters"
                          : "in the reverse order of the parameters";
}

}  // namespace

BucketLayout describe_buckets(const ProcessGroup& group, const NamedTensors& parameters,
                              const GradientBuckets& buckets, bool is_rebuilt) {
  BucketLayout layout;
  layout.is_rebuilt = is_rebuilt;
  for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
    const at::Tensor& flat = buckets.flat(bucket);
    BucketDescription described;
    described.dtype = flat.scalar_type();
    described.total_bytes = flat.nbytes();
    described.is_in_arena = group.is_in_arena(flat);
    for (const std::size_t index : buckets.members(bucket)) {
      described.names.push_back(parameters[index].name);
      described.gradient_bytes += buckets.view(index).nbytes();
    }
    layout.buckets.push_back(std::move(described));
  }
  return layout;
}

std::string to_string(const BucketLayout& layout) {
  std::string text = fmt::format("{} buckets, {}\n", layout.buckets.size(), order_of(layout));
  for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
    const BucketDescription& described = layout.buckets[bucket];
    text += fmt::format("bucket {}: {}, {} bytes of gradients, {} in all, {}: {}\n", bucket,
                        c10::toString(described.dtype), described.gradient_bytes,
                        described.total_bytes, described.is_in_arena ? "in the arena" : "private",
                        fmt::join(described.names, ", "));
  }
  if (!layout.sparse_names.empty()) {
    text += fmt::format("without a bucket (sparse): {}\n", fmt::join(layout.sparse_names, ", "));
  }
  return text;
}

}  // namespace libddp
