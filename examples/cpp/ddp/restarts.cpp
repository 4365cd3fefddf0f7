#include "restarts.h"

#include <cstdio>
#include <string>

namespace {

bool is_due(std::int64_t num_steps, std::int64_t every) {
  return every > 0 && num_steps % every == 0;
}

}  // namespace

Restarts::Restarts(const Options& options, const libddp::Group& group,
                   const std::shared_ptr<torch::nn::Module>& module,
                   torch::optim::Optimizer& optimizer)
    : every_(options.snapshot_every),
      storage_(options.snapshot_storage),
      is_first_(group->rank() == 0),
      state_(module, &optimizer) {
  if (every_ == 0 && storage_ == 0) return;
  snapshot_ = libddp::Snapshot::create(group, {.folder = options.snapshot_folder});
}

std::int64_t Restarts::resume() {
  if (!snapshot_) return 0;
  const auto num_steps = state_.load(*snapshot_);
  if (num_steps && is_first_) {
    std::printf("resuming at step %lld\n", static_cast<long long>(*num_steps));
    std::fflush(stdout);
  }
  return num_steps.value_or(0);
}

void Restarts::save(std::int64_t num_steps) {
  const bool is_stored = is_due(num_steps, storage_);
  if (!is_stored && !is_due(num_steps, every_)) return;
  const std::string extra = R"({"step": )" + std::to_string(num_steps) + "}";
  state_.save(*snapshot_, num_steps, extra,
              is_stored ? libddp::Storage::Folder : libddp::Storage::Memory);
}

void Restarts::close() {
  if (snapshot_) snapshot_->close();
}
