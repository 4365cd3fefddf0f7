#pragma once

// The host's memory that torch allocates in this thread.
//
//   const auto memory = std::make_shared<MemoryPeak>();
//   const c10::DebugInfoGuard counted(c10::DebugInfoKind::PROFILER_STATE, memory);

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace libddp::test {

class MemoryPeak final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*data*/, std::int64_t bytes, std::size_t /*all*/,
                         std::size_t /*reserved*/, c10::Device device) override {
    if (!device.is_cpu()) return;
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }

  /// Bytes.
  std::int64_t now() const { return now_; }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t now_ = 0;
  std::int64_t peak_ = 0;
};

}  // namespace libddp::test
