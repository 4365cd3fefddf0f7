#pragma once

// The Work of an operation on a device: waiting for it orders streams and does not block the host.
//
// The watchdog of devices finishes it once the device has done it, or the group has failed.
// Thread rule: as Work.
//
//   auto work = std::make_shared<StreamWork>(operation, results, device, StreamWork::Wait::Stream);
//   work->wait();           // the current stream of this thread waits
//   work->synchronize();    // this thread waits

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "libddp/cuda/device_operation.h"
#include "libddp/group/work.h"

namespace libddp {

class StreamWork final : public Work, public std::enable_shared_from_this<StreamWork> {
 public:
  /// Who waits: the current stream, or, for a barrier, the host.
  enum class Wait { Stream, Host };

  StreamWork(std::shared_ptr<DeviceOperation> operation, std::vector<at::Tensor> results,
             c10::Device device, Wait wait);

  /// Throws the group's failure where it has failed by now. `timeout` limits a barrier only.
  void wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) override;
  bool is_stream_ordered() const override { return wait_ == Wait::Stream; }
  void synchronize() override;
  bool is_completed() const override;
  /// Runs once the device has done it, in the watchdog's thread.
  void on_complete(std::function<void(Work&)> callback) override;

 private:
  void block_host(std::optional<std::chrono::milliseconds> timeout);

  const std::shared_ptr<DeviceOperation> operation_;
  const c10::Device device_;
  const Wait wait_;
};

}  // namespace libddp
