// libddp-keeper RUN [--linger SECONDS] [--grace SECONDS]: see keeper.h.
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

int usage() {
  std::fputs("usage: libddp-keeper RUN [--linger SECONDS] [--grace SECONDS]\n", stderr);
  return 2;
}

}  // namespace

int main(int count, char** arguments) {
  libddp::Keeper::Options options;
  if (count < 2 || count % 2 != 0 || std::strlen(arguments[1]) > 63) return usage();
  options.run = arguments[1];
  for (int i = 2; i < count; i += 2) {
    const std::string name = arguments[i];
    const auto value = seconds_in(arguments[i + 1]);
    if (!value || (name != "--linger" && name != "--grace")) return usage();
    (name == "--linger" ? options.linger : options.grace) = *value;
  }
  // It outlives the terminal, and what ends the job.
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
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
