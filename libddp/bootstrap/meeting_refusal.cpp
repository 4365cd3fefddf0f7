// refuse_meeting: how a rank that cannot even begin a meeting ends that of the others.

#include <chrono>
#include <exception>

#include "libddp/base/log.h"
#include "libddp/bootstrap/meeting.h"
#include "libddp/bootstrap/meeting_context.h"

namespace libddp {

void refuse_meeting(KeyValueStore& store, const MeetingOptions& options,
                    const std::string& reason) noexcept {
  constexpr std::chrono::seconds kTimeToHear{5};
  if (options.world_size < 2) return;
  try {
    MeetingContext context(store, options, Deadline::after(kTimeToHear));
    context.open();
    // Who reads the reason looks for the hail of its author.
    if (MeetingSession* session = context.session()) session->publish();
    context.announce(reason);
    if (options.rank == 0) context.wait_until_heard();
  } catch (const std::exception& error) {
    // The caller throws the reason; the others will time out.
    log(LogLevel::Warn, "meeting_refusal_not_told",
        {{"group", options.group_name}, {"reason", error.what()}});
  }
}

}  // namespace libddp
