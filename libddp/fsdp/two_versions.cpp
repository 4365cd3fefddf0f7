#include "libddp/fsdp/two_versions.h"

namespace libddp {
namespace {

/// Far from what the whole tensor's count comes to.
constexpr std::uint32_t kApart = 1u << 31;

}  // namespace

void TwoVersions::show_shard(const at::Tensor& parameter) {
  c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  if (shows_shard_ || impl.is_inference()) return;
  shows_shard_ = true;
  whole_ = impl.version_counter();
  if (!shard_.enabled()) {
    seen_ = whole_.current_version() ^ kApart;
    shard_ = c10::VariableVersion(seen_);
  }
  impl.set_version_counter(shard_);
}

void TwoVersions::show_whole(const at::Tensor& parameter) {
  if (!shows_shard_) return;
  shows_shard_ = false;
  // Graphs of before an optimizer's step are refused as everywhere.
  if (shard_.current_version() != seen_) whole_.bump();
  seen_ = shard_.current_version();
  parameter.unsafeGetTensorImpl()->set_version_counter(whole_);
}

}  // namespace libddp
