#pragma once

// The Work of an operation on a device: waiting for it orders streams and does not block the host.
//
// Its backend finishes it once the device has done it, or the group has failed; a backend without a
// thread that looks at devices gives one that does when somebody asks for a callback.
// Thread rule: as Work.
//
//   auto work = std::make_shared<StreamWork>(operation, results, device, StreamWork::Wait::Stream);
//   work->wait();           // the current stream of this thread waits
//   work->synchronize();    // this thread waits

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "libddp/group/device_operation.h"
#include "libddp/group/work.h"

namespace libddp {

class StreamWork final : public Work, public std::enable_shared_from_this<StreamWork> {
 public:
  /// Who waits: the current stream, or, for a barrier, the host.
  enum class Wait { Stream, Host };

  /// Finishes a work, in another thread, once is_completed() says so.
  using Finisher = std::function<void(std::shared_ptr<StreamWork>)>;

  /// `finisher`: empty where the backend finishes it anyway.
  StreamWork(std::shared_ptr<DeviceOperation> operation, std::vector<at::Tensor> results,
             c10::Device device, Wait wait, Finisher finisher = nullptr);

  /// Throws the group's failure where it has failed by now. `timeout` limits a barrier only.
  void wait(std::optional<std::chrono::milliseconds> timeout = std::nullopt) override;
  void order_stream() noexcept override;
  bool is_stream_ordered() const override { return wait_ == Wait::Stream; }
  c10::Device device() const override { return device_; }
  void synchronize() override;
  bool is_completed() const override;
  /// Runs once the device has done it, in the thread that finds out.
  void on_complete(std::function<void(Work&)> callback) override;

 private:
  void block_host(std::optional<std::chrono::milliseconds> timeout);

  const std::shared_ptr<DeviceOperation> operation_;
  const c10::Device device_;
  const Wait wait_;
  const Finisher finisher_;
};

}  // namespace libddp
