#include "restarts.h"

#include <ATen/ops/zeros.h>
#include <torch/serialize.h>

#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace {

/// An archive's directory and names, for each parameter.
constexpr std::int64_t kRoomPerParameter = 4096;
/// AdamW's two moments.
constexpr std::int64_t kStatesPerParameter = 2;

bool is_due(std::int64_t num_steps, std::int64_t every) {
  return every > 0 && num_steps % every == 0;
}

}  // namespace

Restarts::Restarts(const Options& options, const libddp::Group& group,
                   const torch::OrderedDict<std::string, at::Tensor>& parameters,
                   torch::optim::Optimizer& optimizer, Parameters kind)
    : every_(options.snapshot_every),
      storage_(options.snapshot_storage),
      is_first_(group->rank() == 0),
      parameters_(parameters),
      optimizer_(optimizer) {
  if (every_ == 0 && storage_ == 0) return;
  if (kind == Parameters::Sharded) own_ = "rank-" + std::to_string(group->rank()) + ".";
  std::int64_t room = kRoomPerParameter;
  for (const auto& item : parameters_) {
    const at::Tensor& value = item.value();
    const auto num_bytes = value.numel() * static_cast<std::int64_t>(value.element_size());
    room += kStatesPerParameter * num_bytes + kRoomPerParameter;
  }
  archive_ = at::zeros({room}, at::kByte);
  snapshot_ = libddp::Snapshot::create(group, {.folder = options.snapshot_folder});
}

// Anew for each call: the first step of a shared AdamW moves the parameters to other memory.
std::vector<libddp::SnapshotTensor> Restarts::tensors() const {
  using libddp::StoredBy;
  const bool is_alike = own_.empty();
  std::vector<libddp::SnapshotTensor> tensors;
  for (const auto& item : parameters_) {
    tensors.push_back(
        libddp::SnapshotTensor::whole(own_ + "model." + item.key(), item.value().detach(),
                                      is_alike ? StoredBy::HostTogether : StoredBy::EachRank));
  }
  tensors.push_back(libddp::SnapshotTensor::whole(
      own_ + "optimizer", archive_, is_alike ? StoredBy::FirstOfHost : StoredBy::EachRank));
  return tensors;
}

std::int64_t Restarts::resume() {
  if (!snapshot_) return 0;
  const auto num_steps = snapshot_->load(tensors());
  if (num_steps) read_optimizer();
  if (num_steps && is_first_) {
    std::printf("resuming at step %lld\n", static_cast<long long>(*num_steps));
    std::fflush(stdout);
  }
  return num_steps.value_or(0);
}

void Restarts::save(std::int64_t num_steps) {
  const bool is_stored = is_due(num_steps, storage_);
  if (!is_stored && !is_due(num_steps, every_)) return;
  write_optimizer();
  snapshot_->save(num_steps, tensors(), "null",
                  is_stored ? libddp::Storage::Folder : libddp::Storage::Memory);
}

void Restarts::close() {
  if (snapshot_) snapshot_->close();
}

void Restarts::write_optimizer() {
  std::ostringstream stream;
  torch::save(optimizer_, stream);
  const std::string text = stream.str();
  const auto size = static_cast<std::uint64_t>(text.size());
  if (sizeof(size) + text.size() > static_cast<std::size_t>(archive_.numel())) {
    throw std::logic_error("the optimizer's archive has " + std::to_string(size) +
                           " bytes, and the snapshot's room for it " +
                           std::to_string(archive_.numel()) + ".");
  }
  std::memcpy(archive_.data_ptr(), &size, sizeof(size));
  std::memcpy(archive_.data_ptr<std::uint8_t>() + sizeof(size), text.data(), text.size());
}

void Restarts::read_optimizer() {
  std::uint64_t size = 0;
  std::memcpy(&size, archive_.data_ptr(), sizeof(size));
  const auto* begin = archive_.data_ptr<std::uint8_t>() + sizeof(size);
  std::istringstream stream(std::string(begin, begin + size));
  torch::load(optimizer_, stream);
}
