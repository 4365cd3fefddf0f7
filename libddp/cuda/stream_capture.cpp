#include "libddp/cuda/stream_capture.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <cuda_runtime_api.h>

#include "libddp/cuda/loaded_cuda.h"

namespace libddp {
namespace {

bool asks_runtime(const c10::Stream& stream) {
  static auto* const query =
      runtime_function<decltype(::cudaStreamIsCapturing)>("cudaStreamIsCapturing");
  if (query == nullptr || stream.device_type() != c10::DeviceType::CUDA) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto result = query(static_cast<cudaStream_t>(stream.native_handle()), &status);
  return result == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

/// Guards of torch before 2.12 could not tell.
template <typename Guard>
bool asks(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return asks_runtime(stream);
  }
}

}  // namespace

bool is_capturing(const c10::Stream& stream) {
  return asks(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

void allow_queries_beside_capture() {
  auto* const exchange = runtime_function<decltype(::cudaThreadExchangeStreamCaptureMode)>(
      "cudaThreadExchangeStreamCaptureMode");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  if (exchange != nullptr) exchange(&mode);
}

}  // namespace libddp
