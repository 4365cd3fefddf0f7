#include "tests/fakegpu/race_checker.h"

#include <sstream>

#include "tests/fakegpu/access_log.h"

namespace fakegpu {
namespace {

void write(std::ostream& out, const Operation& operation) {
  out << operation.name;
  if (operation.is_of_host) {
    out << " of the host";
    return;
  }
  if (operation.number != 0) out << " #" << operation.number;
  out << " on device " << int{operation.stream.device_index()} << " stream "
      << operation.stream.id();
}

}  // namespace

std::string Race::text() const {
  std::ostringstream out;
  write(out, first);
  out << (freed ? " may still use freed memory that the next " : " is not ordered with ");
  write(out, second);
  if (freed) out << " may be given";
  out << ": bytes " << begin << " to " << end << " of " << block_bytes << " at " << block;
  return out.str();
}

std::vector<Race> races() { return AccessLog::get().take_races(); }
void reset() { AccessLog::get().reset(); }
void ignore_wait(std::int64_t k, int device) { AccessLog::get().ignore_wait(k, device); }
void ignore_host_wait(std::int64_t k, int device) { AccessLog::get().ignore_host_wait(k, device); }
std::int64_t num_waits(int device) { return AccessLog::get().num_waits(device); }
std::int64_t num_operations(int device) { return AccessLog::get().num_operations(device); }
std::int64_t num_host_waits(int device) { return AccessLog::get().num_host_waits(device); }
std::vector<std::int64_t> redundant_waits(int device) {
  return AccessLog::get().redundant_waits(device);
}

}  // namespace fakegpu
