#include "libddp/elastic/launcher_line.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "libddp/base/departure.h"
#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/log.h"
#include "libddp/base/parent_only.h"
#include "libddp/base/service_thread.h"
#include "libddp/group/open_groups.h"
#include "libddp/transport/unix_socket.h"

namespace libddp {
namespace {

constexpr const char* kVariable = "LIBDDP_IN_PLACE";
/// For an answer of a launcher that lives; it may be in the middle of a meeting of hosts.
constexpr std::chrono::minutes kLauncherTime{10};

Assignment assignment_of(const nlohmann::json& told) {
  return {.epoch = told.at("epoch").get<int>(),
          .restarts = told.at("restarts").get<int>(),
          .is_survivor = told.at("is_survivor").get<bool>(),
          .failure = told.at("failure").get<std::string>(),
          .environment = told.at("environment").get<std::map<std::string, std::string>>()};
}

}  // namespace

LauncherLine::LauncherLine(UniqueFd socket) : socket_(std::move(socket)) {
  close_in_children(socket_.get());
  thread_ = start_service_thread("libddp-launcher", [this] { read(); });
}

LauncherLine::~LauncherLine() {
  ::shutdown(socket_.get(), SHUT_RDWR);
  thread_.join();
}

LauncherLine* LauncherLine::connect() {
  const std::optional<std::string> name = env_text(kVariable);
  if (!name) return nullptr;
  UniqueFd socket;
  try {
    socket = connect_unix(*name, Deadline::after(kLauncherTime));
  } catch (const NetworkError& error) {
    throw NetworkError(
        fmt::format("libddp: {}={}, but no launcher is there ({}). Hint: start the program by "
                    "`libddp run --in-place`, or unset the variable.",
                    kVariable, *name, error.what()));
  }
  if (peer_credentials(socket.get()).uid != ::geteuid()) {
    throw NetworkError(fmt::format("libddp: {}={} is another user's. Hint: unset the variable.",
                                   kVariable, *name));
  }
  auto line = std::unique_ptr<LauncherLine>(new LauncherLine(std::move(socket)));
  const Deadline deadline = Deadline::after(kLauncherTime);
  std::unique_lock lock(line->mutex_);
  while (!line->is_welcome_ && !line->is_over_) {
    if (deadline.expired()) break;
    line->changed_.wait_for(lock, kInterruptPeriod);
    check_interrupt();
  }
  const bool is_welcome = line->is_welcome_;
  lock.unlock();
  if (is_welcome) return line.release();
  if (!deadline.expired()) return nullptr;  // not one of its workers
  throw TimeoutError(fmt::format(
      "libddp: the launcher of {}={} did not answer within {} min. Hint: see what it does.",
      kVariable, *name, kLauncherTime.count()));
}

LauncherLine* LauncherLine::find() {
  struct Found {
    std::mutex mutex;
    ProcessStamp in;
    LauncherLine* line = nullptr;
    bool is_asked_for = false;
  };
  static auto* const found = new Found;  // its thread reads until the process is gone
  if (!found->in.is_current()) return nullptr;
  const std::lock_guard lock(found->mutex);
  if (!found->is_asked_for) {
    found->line = connect();
    found->is_asked_for = true;
  }
  return found->line;
}

void LauncherLine::arrive() {
  const std::lock_guard lock(mutex_);
  is_between_epochs_ = true;
  withdraw_departure();
}

void LauncherLine::come(const std::string& why) {
  const std::string text =
      nlohmann::json{{"ready", why}}.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) +
      "\n";
  std::size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t count =
        ::send(socket_.get(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count > 0) sent += static_cast<std::size_t>(count);
    if (count >= 0 || errno == EINTR) continue;
    if (errno != EAGAIN) return;  // the launcher is gone: wait() says so
    pollfd entry{socket_.get(), POLLOUT, 0};
    ::poll(&entry, 1, static_cast<int>(kInterruptPeriod.count()));
    check_interrupt();
  }
}

Assignment LauncherLine::wait(Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (!next_) {
    if (is_over_) {
      throw StateError(
          "libddp: the launcher has ended the run, so there is no next epoch. Hint: what it said "
          "is on its own output.");
    }
    if (deadline.expired()) {
      throw TimeoutError(
          "libddp: the launcher began no next epoch within the deadline: a rank or a host has not "
          "come. Hint: what it waits for is on its own output.");
    }
    changed_.wait_for(lock, kInterruptPeriod);
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  return *std::exchange(next_, std::nullopt);
}

bool LauncherLine::is_asked() { return is_departing(); }

void LauncherLine::read() {
  std::string buffer;
  std::array<char, 4096> piece{};
  for (;;) {
    pollfd entry{socket_.get(), POLLIN, 0};
    if (::poll(&entry, 1, -1) < 0 && errno != EINTR) break;
    const ssize_t count = ::recv(socket_.get(), piece.data(), piece.size(), 0);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) break;
    if (count < 0) continue;
    buffer.append(piece.data(), static_cast<std::size_t>(count));
    for (std::size_t end = buffer.find('\n'); end != std::string::npos; end = buffer.find('\n')) {
      take(buffer.substr(0, end));
      buffer.erase(0, end + 1);
    }
  }
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

void LauncherLine::take(const std::string& line) {
  try {
    const nlohmann::json told = nlohmann::json::parse(line);
    if (told.contains("leave")) return leave(told.at("leave").get<std::string>());
    const std::lock_guard lock(mutex_);
    if (told.contains("welcome")) is_welcome_ = true;
    if (told.contains("go")) {
      next_ = assignment_of(told.at("go"));
      is_between_epochs_ = false;
    }
    changed_.notify_all();
  } catch (const nlohmann::json::exception& error) {
    log(LogLevel::Error, "launcher_line_refused", {{"error", error.what()}});
  }
}

void LauncherLine::leave(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (is_between_epochs_) return;
    ask_to_depart(
        fmt::format("libddp: the launcher asks this rank to leave its epoch: {}", reason));
  }
  for (const Group& group : open_groups()) {
    try {
      group->abort(reason);
    } catch (const Error&) {
      // Closed meanwhile: there is nothing left to end.
    }
  }
}

}  // namespace libddp
