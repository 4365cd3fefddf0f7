#include "libddp/host/member_handle.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/bootstrap/record.h"

namespace libddp {
namespace {

constexpr RecordForm kHandleForm{"libddp-member-1", "the handle is no reconfigure handle"};
constexpr std::size_t kInstanceBytes = 16;
constexpr std::size_t kMaxShownBytes = 64;

bool is_numeric_address(const std::string& text) {
  in6_addr any{};
  return ::inet_pton(AF_INET, text.c_str(), &any) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), &any) == 1;
}

[[noreturn]] void refuse_handle(const std::string& text, const std::string& why) {
  throw ArgumentError(fmt::format(
      "'{}' is no reconfigure handle of libddp ({}). Hint: pass what "
      "torch.distributed._get_reconfigure_handle() has answered in a process of this job, as it is",
      printable(text.substr(0, kMaxShownBytes)), why));
}

}  // namespace

MemberHandle MemberHandle::own(std::string address, std::uint16_t port,
                               const std::string& host_identity) {
  MemberHandle mine;
  mine.instance = random_hex(kInstanceBytes);
  mine.address = std::move(address);
  mine.port = port;
  mine.pid = ::getpid();
  mine.begun = process_begin(mine.pid);
  mine.host = host_name();
  mine.host_key =
      machine_id() + '/' + (host_identity.empty() ? network_namespace() : host_identity);
  if (!boot_id().empty() && !pid_namespace().empty()) {
    mine.pid_place = boot_id() + '/' + pid_namespace();
  }
  return mine;
}

std::string MemberHandle::encode() const {
  return RecordWriter(kHandleForm)
      .field(instance)
      .field(address)
      .integer(port)
      .integer(pid)
      .field(begun)
      .field(host)
      .field(host_key)
      .field(pid_place)
      .text();
}

MemberHandle MemberHandle::decode(const std::string& text) {
  if (text.size() > kMaxBytes) {
    refuse_handle(text, fmt::format("{} bytes, and one has at most {}", text.size(), kMaxBytes));
  }
  MemberHandle handle;
  try {
    RecordReader fields(kHandleForm, text);
    handle.instance = fields.field();
    handle.address = fields.field();
    handle.port =
        static_cast<std::uint16_t>(fields.integer(1, std::numeric_limits<std::uint16_t>::max()));
    handle.pid = fields.integer(1);
    handle.begun = fields.field();
    handle.host = fields.field();
    handle.host_key = fields.field();
    handle.pid_place = fields.field();
    fields.end();
  } catch (const StoreError& error) {
    const bool is_other_version = text.starts_with("libddp-member-");
    refuse_handle(text, is_other_version ? error.what() : "it is of another form");
  }
  if (!is_random_hex(handle.instance, kInstanceBytes))
    refuse_handle(text, "its name is of another form");
  if (!is_numeric_address(handle.address)) refuse_handle(text, "it holds no numeric address");
  return handle;
}

std::string MemberHandle::who() const {
  return fmt::format("pid {} on {}", pid, printable(host.substr(0, kMaxShownBytes)));
}

}  // namespace libddp
