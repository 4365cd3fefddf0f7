#include "libddp/base/log.h"

#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/printable.h"

namespace libddp {
namespace {

constexpr int kUnset = -1;
std::atomic<int> chosen_level{kUnset};
std::atomic<int> log_rank{-1};

constexpr std::string_view kLevelNames[] = {"DEBUG", "INFO", "WARN", "ERROR", "OFF"};

std::string timestamp() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                     now.tv_nsec / 1'000'000);
}

// A value stays one word: quoted where a reader could not tell its end, escaped so that it cannot
// start a line of its own, nor reach a terminal.
void append_value(std::string& line, std::string_view value) {
  std::string quoted;
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  quoted = printable(quoted);
  const bool is_word =
      !value.empty() && quoted == value && value.find_first_of(" =") == std::string_view::npos;
  line += is_word ? quoted : fmt::format("\"{}\"", quoted);
}

void write_line(std::string line) {
  line += '\n';
  // One call, so that lines do not mix. A full or closed stderr is nobody's reason to fail.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

LogLevel level_from_environment() {
  try {
    const auto text = env_choice("LIBDDP_LOG_LEVEL", {"DEBUG", "INFO", "WARN", "ERROR", "OFF"});
    for (int i = 0; text && i <= static_cast<int>(LogLevel::Off); ++i) {
      if (*text == kLevelNames[i]) return static_cast<LogLevel>(i);
    }
  } catch (const ArgumentError& error) {
    write_line(format_log_line(LogLevel::Warn, "bad_log_level", {{"reason", error.what()}}));
  }
  return LogLevel::Warn;
}

}  // namespace

void set_log_rank(int rank) { log_rank.store(rank, std::memory_order_relaxed); }

void set_log_level(LogLevel level) { chosen_level.store(static_cast<int>(level)); }

LogLevel log_level() {
  int level = chosen_level.load(std::memory_order_relaxed);
  if (level == kUnset) {
    const int found = static_cast<int>(level_from_environment());
    // Whoever set a level meanwhile wins.
    level = chosen_level.compare_exchange_strong(level, found) ? found : level;
  }
  return static_cast<LogLevel>(level);
}

std::string format_log_line(LogLevel level, std::string_view event,
                            std::initializer_list<LogField> fields) {
  std::string line =
      fmt::format("libddp time={} level={}", timestamp(), kLevelNames[static_cast<int>(level)]);
  const int rank = log_rank.load(std::memory_order_relaxed);
  if (rank >= 0) line += fmt::format(" rank={}", rank);
  line += fmt::format(" pid={} event=", ::getpid());
  append_value(line, event);
  for (const LogField& field : fields) {
    line += ' ';
    line += field.key;
    line += '=';
    append_value(line, field.value);
  }
  return line;
}

void log_text(LogLevel level, const std::string& text) noexcept {
  if (level == LogLevel::Off || level < log_level()) return;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

void log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) noexcept {
  try {
    if (level == LogLevel::Off || level < log_level()) return;
    write_line(format_log_line(level, event, fields));
  } catch (...) {
    // Only memory can be short here; a fixed text needs none.
    constexpr std::string_view kLost = "libddp level=ERROR event=log_line_lost\n";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kLost.data(), kLost.size());
  }
}

}  // namespace libddp
