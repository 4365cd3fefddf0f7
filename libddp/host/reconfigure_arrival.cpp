#include "libddp/host/reconfigure_arrival.h"

#include <fmt/format.h>

#include <charconv>
#include <system_error>

#include "libddp/base/error.h"
#include "libddp/base/random.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kArrivalForm{"libddp-arrival-1", "the store holds no arrival of a member"};
constexpr std::size_t kDigestBytes = 8;

}  // namespace

ReconfigureArrival ReconfigureArrival::of(const ReconfigurePlan& plan) {
  return {plan.uuid(), plan.world_size(), plan.digest()};
}

std::string ReconfigureArrival::encode() const {
  return RecordWriter(kArrivalForm)
      .field(std::to_string(uuid))
      .integer(world_size)
      .field(digest)
      .text();
}

ReconfigureArrival ReconfigureArrival::decode(const std::string& text) {
  RecordReader fields(kArrivalForm, text);
  ReconfigureArrival arrival;
  const std::string uuid = fields.field();
  const char* const end = uuid.data() + uuid.size();
  const auto [stop, error] = std::from_chars(uuid.data(), end, arrival.uuid);
  if (error != std::errc() || stop != end) fields.refuse();
  arrival.world_size = fields.integer(1, static_cast<int>(ReconfigurePlan::kMaxMembers));
  arrival.digest = fields.field();
  fields.end();
  if (!is_random_hex(arrival.digest, kDigestBytes)) fields.refuse();
  return arrival;
}

std::string ReconfigureArrival::round() const {
  return fmt::format("{}-{}-{}", uuid, world_size, digest);
}

std::string ReconfigureArrival::difference(const ReconfigureArrival& other) const {
  if (uuid != other.uuid) return fmt::format("uuid {} and uuid {}", uuid, other.uuid);
  if (world_size != other.world_size) {
    return fmt::format("{} and {} handles", world_size, other.world_size);
  }
  return "other handles, or the same in another order";
}

}  // namespace libddp
