#include "libddp/bootstrap/refusal_log.h"

#include "libddp/base/log.h"

namespace libddp {
namespace {

constexpr std::chrono::seconds kReportPeriod{1};

}  // namespace

void RefusalLog::report(const std::string& reason) {
  ++num_refused_;
  if (!next_.expired()) return;
  next_ = Deadline::after(kReportPeriod);
  log(LogLevel::Warn, event_,
      {{"endpoint", endpoint_}, {"reason", reason}, {"num_refused", num_refused_}});
}

}  // namespace libddp
