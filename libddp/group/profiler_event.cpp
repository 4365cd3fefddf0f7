#include "libddp/group/profiler_event.h"

#include <ATen/ThreadLocalState.h>
#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace libddp {
namespace {

constexpr auto kLastKind = static_cast<std::size_t>(OpKind::Recv);

/// Of static lifetime: profilers keep no copy.
std::string_view title_of(const OpDescription& operation) {
  static const auto titles = [] {
    std::vector<std::string> made;
    for (std::size_t kind = 0; kind <= kLastKind; ++kind) {
      made.push_back(fmt::format("libddp:{}", name(static_cast<OpKind>(kind))));
    }
    return made;
  }();
  if (operation.kind == OpKind::Recv && operation.root < 0) return "libddp:recvAnySource";
  return titles[static_cast<std::size_t>(operation.kind)];
}

}  // namespace

thread_local bool ProfilerEvent::is_issuing = false;

void ProfilerEvent::begin(at::StepCallbacks observers, const OpDescription& operation,
                          at::ArrayRef<at::Tensor> inputs) {
  if (std::exchange(is_issuing, true)) return;
  event_ = std::make_shared<at::RecordFunction>(std::move(observers));
  event_->_setAsync();  // as those of torch's backends: it is no part of the call stack
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  event_->before(title_of(operation),
                 c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

void ProfilerEvent::end_when_done(Work& work) {
  // On a device the profiler sees the kernels themselves; this event is the call.
  if (work.is_stream_ordered()) return event_->end();
  // As torch's own works do: the end belongs to the caller's profiler, whichever thread it is in.
  work.on_complete(
      [end = at::wrapPropagateTLSState([event = event_] { event->end(); })](Work&) { end(); });
}

}  // namespace libddp
