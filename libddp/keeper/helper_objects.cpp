#include "libddp/keeper/helper_objects.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/deadline.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"
#include "libddp/base/system_error.h"
#include "libddp/slots/json_text.h"
#include "libddp/transport/frame.h"

namespace libddp {
namespace {

using nlohmann::json;

/// A list of names or an index come back, and chunks of 4 MiB go there.
constexpr FrameLimits kHelperLimits{.max_bytes = 80u << 20, .max_descriptors = 0};
/// For a call: a service's retries, or the end of a large upload, may take minutes.
constexpr std::chrono::minutes kCallPatience{30};
/// To end by itself when it is told to.
constexpr std::chrono::milliseconds kEndPatience{1'000};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (const std::string& text : texts) all.push_back(const_cast<char*>(text.c_str()));
  all.push_back(nullptr);
  return all;
}

[[noreturn]] void refuse_address(const std::string& address, const std::string& why,
                                 const char* hint) {
  throw SnapshotError(
      fmt::format("libddp snapshot: {}: {}. Hint: {}.", printable(address), why, hint));
}

}  // namespace

HelperObjects::HelperObjects(const StorageHelper& helper, std::string address)
    : address_(std::move(address)) {
  start(helper);
  try {
    call(to_text({{"call", "start"}, {"address", address_}}));
  } catch (...) {
    end();
    throw;
  }
}

HelperObjects::~HelperObjects() { end(); }

void HelperObjects::end() {
  socket_.reset();
  const Deadline end = Deadline::after(kEndPatience);
  while (::waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (end.expired()) ::kill(pid_, SIGKILL);
    ::poll(nullptr, 0, 5);
  }
}

void HelperObjects::start(const StorageHelper& helper) {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    refuse_address(address_, errno_text("socketpair", errno), "look at this machine's limits");
  }
  socket_ = UniqueFd(ends[0]);
  const UniqueFd other(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, other.get(), 0);
  // What its libraries print goes where the keeper's log goes.
  ::posix_spawn_file_actions_adddup2(&actions, 2, 1);
  const std::vector<char*> arguments = pointers(helper.program);
  const std::vector<char*> environment = pointers(helper.environment);
  const int error = ::posix_spawnp(&pid_, helper.program.at(0).c_str(), &actions, nullptr,
                                   arguments.data(), environment.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error == 0) return;
  refuse_address(address_,
                 fmt::format("the program {} that stores there could not be started: {}",
                             printable(helper.program[0]), std::strerror(error)),
                 "it is the Python of the job, which must be on this host as long as the job is");
}

std::vector<std::string> HelperObjects::list() const {
  const json names =
      parse_json(call(to_text({{"call", "list"}})), {.max_bytes = kHelperLimits.max_bytes});
  std::vector<std::string> all;
  for (const json& name : names) {
    if (name.is_string()) all.push_back(name.get<std::string>());
  }
  return all;
}

std::string HelperObjects::read(const std::string& name, std::uint64_t offset,
                                std::uint64_t bytes) const {
  return call(to_text({{"call", "read"}, {"name", name}, {"offset", offset}, {"bytes", bytes}}));
}

void HelperObjects::write(const std::string& name, std::uint64_t bytes,
                          const std::function<void(const Append&)>& produce) {
  call(to_text({{"call", "open"}, {"name", name}, {"bytes", bytes}}));
  try {
    produce([&](std::span<const std::byte> part) {
      const std::string payload(reinterpret_cast<const char*>(part.data()), part.size());
      call(to_text({{"call", "append"}}), &payload);
    });
  } catch (...) {
    // The first error is the one to know; one that is lost discards by itself.
    try {
      call(to_text({{"call", "discard"}}));
    } catch (const Error&) {
    }
    throw;
  }
  call(to_text({{"call", "close"}}));
}

void HelperObjects::create(const std::string& name, const std::string& text) {
  call(to_text({{"call", "create"}, {"name", name}}), &text);
}

void HelperObjects::remove(const std::vector<std::string>& names) {
  call(to_text({{"call", "remove"}, {"names", names}}));
}

void HelperObjects::abandon() {
  is_lost_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);
}

std::string HelperObjects::call(const std::string& request, const std::string* payload) const {
  std::string answer;
  try {
    const Deadline deadline = Deadline::after(kCallPatience);
    send_frame(socket_.get(), request, {}, deadline);
    if (payload) send_frame(socket_.get(), *payload, {}, deadline);
    answer = receive_frame(socket_.get(), kHelperLimits, deadline).bytes;
  } catch (const Error& error) {
    is_lost_ = true;
    refuse_address(
        address_,
        fmt::format("the process {} that stores there does not answer: {}", pid_, error.what()),
        "the keeper's log (LIBDDP_KEEPER_LOG) has what it said; the next save to be "
        "stored starts another one");
  }
  // The first byte says which of the two the others are.
  if (answer.empty() || (answer[0] != '+' && answer[0] != '-')) {
    is_lost_ = true;
    refuse_address(address_, "the process that stores there answers in no known way",
                   "it must be of the same version of libddp");
  }
  const bool is_error = answer[0] == '-';
  answer.erase(0, 1);
  if (is_error) throw SnapshotError(answer);
  return answer;
}

}  // namespace libddp
