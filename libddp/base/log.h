#pragma once

// One line per event on stderr, key=value:
//
//   libddp time=2026-01-31T12:00:00.123Z level=WARN rank=3 pid=4711 event=prefault_failed
//   bytes=4096
//
// LIBDDP_LOG_LEVEL = DEBUG, INFO, WARN (default), ERROR, OFF. INFO is for life-cycle events, DEBUG
// for single operations. Never log environments or tokens.
// Thread rule: any thread; a line is one write(), so lines of several ranks do not mix.
//
//   log(LogLevel::Info, "group_created", {{"group", name}, {"world_size", 8}});

#include <initializer_list>
#include <string>
#include <string_view>

namespace libddp {

enum class LogLevel { Debug, Info, Warn, Error, Off };

/// One key=value of a line.
struct LogField {
  LogField(std::string_view key, std::string_view value) : key(key), value(value) {}
  LogField(std::string_view key, const std::string& value) : key(key), value(value) {}
  LogField(std::string_view key, const char* value) : key(key), value(value) {}
  LogField(std::string_view key, long value) : key(key), value(std::to_string(value)) {}
  LogField(std::string_view key, int value) : key(key), value(std::to_string(value)) {}
  LogField(std::string_view key, unsigned long value) : key(key), value(std::to_string(value)) {}

  std::string_view key;
  std::string value;
};

/// Rank shown in every line from now on; -1 for none.
void set_log_rank(int rank);
void set_log_level(LogLevel level);
/// The level set, else the environment's. A value that is no level is reported in one WARN line,
/// because a log call must not fail; the level is then WARN.
LogLevel log_level();

/// Never throws. Does nothing below log_level().
void log(LogLevel level, std::string_view event,
         std::initializer_list<LogField> fields = {}) noexcept;

/// As it is, for what does not fit on a line; one write(). Does nothing below log_level().
void log_text(LogLevel level, const std::string& text) noexcept;

/// The text of a line without its end, for tests.
std::string format_log_line(LogLevel level, std::string_view event,
                            std::initializer_list<LogField> fields);

}  // namespace libddp
