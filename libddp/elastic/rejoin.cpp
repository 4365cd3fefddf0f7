#include "libddp/elastic/rejoin.h"

#include <cstdlib>
#include <string>

#include "libddp/base/error.h"
#include "libddp/base/first_line.h"
#include "libddp/elastic/launcher_line.h"

namespace libddp {
namespace {

/// What the group has failed of; empty while it is healthy.
std::string failure_of(const Group& group) {
  const std::exception_ptr failure = group->failure();
  return failure ? first_line_of(failure) : "";
}

void leave(const Group& group, const std::string& failure) {
  try {
    if (failure.empty()) group->abort("this rank leaves for the next epoch");
  } catch (const StateError&) {
    // Shut down already.
  }
}

}  // namespace

Group rejoin(const Group& group, std::chrono::milliseconds limit, const InitOptions& options) {
  LauncherLine* const line = LauncherLine::find();
  if (line == nullptr) {
    throw StateError(
        "libddp rejoin: no `libddp run --in-place` has started this process, so nobody replaces "
        "ranks that are lost. Hint: start it so, or call init_process_group and end on errors.");
  }
  line->arrive();
  std::string why;
  if (group) {
    why = failure_of(group);
    leave(group, why);
    if (why.empty()) why = "rejoin() was called";
  }
  line->come(why);
  const Assignment next = line->wait(Deadline::after(limit));
  for (const auto& [name, value] : next.environment) ::setenv(name.c_str(), value.c_str(), 1);
  return init_process_group(options);
}

bool is_of_others(const Error& error) {
  if (LauncherLine::is_asked()) return true;
  const auto* const peer = dynamic_cast<const PeerError*>(&error);
  if (peer != nullptr) return peer->peer_rank() >= 0;
  return dynamic_cast<const NetworkError*>(&error) != nullptr ||
         dynamic_cast<const TimeoutError*>(&error) != nullptr ||
         dynamic_cast<const StoreError*>(&error) != nullptr;
}

}  // namespace libddp
