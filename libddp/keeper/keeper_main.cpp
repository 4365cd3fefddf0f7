// libddp-keeper RUN [--linger SECONDS] [--grace SECONDS] [--bytes-per-second N]: see keeper.h.
//
// Exit status: 0 = the job has finished, or nobody came back; 2 = another keeper of the job is
// there, or wrong arguments; 1 = anything else.

#include <fmt/format.h>
#include <signal.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "libddp/base/error.h"
#include "libddp/keeper/keeper.h"

namespace {

std::optional<std::chrono::milliseconds> seconds_in(const char* text) {
  double seconds = 0;
  const char* end = text + std::strlen(text);
  const auto read = std::from_chars(text, end, seconds);
  if (read.ec != std::errc() || read.ptr != end || !(seconds >= 0 && seconds < 1e9)) return {};
  return std::chrono::milliseconds(static_cast<long>(seconds * 1000));
}

std::optional<std::uint64_t> number_in(const char* text) {
  std::uint64_t number = 0;
  const char* end = text + std::strlen(text);
  const auto read = std::from_chars(text, end, number);
  if (read.ec != std::errc() || read.ptr != end) return {};
  return number;
}

/// False if there is no such option, or no such value.
bool set_option(libddp::Keeper::Options& options, const std::string& name, const char* text) {
  if (name == "--bytes-per-second") {
    const auto value = number_in(text);
    options.bytes_per_second = value.value_or(0);
    return value.has_value();
  }
  const auto value = seconds_in(text);
  if (!value || (name != "--linger" && name != "--grace")) return false;
  (name == "--linger" ? options.linger : options.grace) = *value;
  return true;
}

int usage() {
  std::fputs(
      "usage: libddp-keeper RUN [--linger SECONDS] [--grace SECONDS] [--bytes-per-second N]\n",
      stderr);
  return 2;
}

}  // namespace

int main(int count, char** arguments) {
  libddp::Keeper::Options options;
  if (count < 2 || count % 2 != 0 || std::strlen(arguments[1]) > 63) return usage();
  options.run = arguments[1];
  for (int i = 2; i < count; i += 2) {
    if (!set_option(options, arguments[i], arguments[i + 1])) return usage();
  }
  // It outlives the terminal, and what ends the job.
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
  // A limit of the size of files (ulimit -f, a quota) is an error of the file.
  ::signal(SIGXFSZ, SIG_IGN);
  std::optional<libddp::Keeper> keeper;
  try {
    keeper.emplace(options);
  } catch (const libddp::NetworkError& error) {
    fmt::print(stderr, "libddp-keeper: {}\n", error.what());
    return 2;
  }
  try {
    keeper->run();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "libddp-keeper: {}\n", error.what());
    return 1;
  }
}
