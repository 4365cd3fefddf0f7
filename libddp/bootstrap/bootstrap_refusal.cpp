// refuse_bootstrap: how a rank that cannot even begin a bootstrap ends that of the others.

#include <chrono>
#include <exception>

#include "libddp/base/log.h"
#include "libddp/bootstrap/bootstrap.h"
#include "libddp/bootstrap/bootstrap_context.h"

namespace libddp {

void refuse_bootstrap(KeyValueStore& store, const BootstrapOptions& options,
                      const std::string& reason) noexcept {
  constexpr std::chrono::seconds kTimeToHear{5};
  if (options.world_size < 2) return;
  try {
    BootstrapContext context(store, options, Deadline::after(kTimeToHear));
    context.open();
    // Who reads the reason looks for the join entry of its author.
    if (BootstrapSession* session = context.session()) session->publish();
    context.announce(reason);
    if (options.rank == 0) context.wait_until_heard();
  } catch (const std::exception& error) {
    // The caller throws the reason; the others will time out.
    log(LogLevel::Warn, "bootstrap_refusal_not_told",
        {{"group", options.group_name}, {"reason", error.what()}});
  }
}

}  // namespace libddp
