#include "libddp/base/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"

using namespace libddp;
using libddp::test::contains;

namespace {

// What `call` writes to stderr, in a child, so that the test's own stderr stays.
template <typename Call>
std::string stderr_of(Call call) {
  const auto results = libddp::test::fork_ranks(1, [&](int) -> std::string {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return "no pipe";
    const UniqueFd reader(ends[0]);
    const UniqueFd writer(ends[1]);
    ::dup2(writer.get(), STDERR_FILENO);
    call();
    std::string text(60'000, '\0');
    const ssize_t size = ::read(reader.get(), text.data(), text.size());
    text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    return text;
  });
  REQUIRE(results[0].ok());
  return results[0].text;
}

}  // namespace

TEST_CASE("A log line has time, level, rank, pid, event and fields") {
  set_log_rank(3);
  const std::string line = format_log_line(LogLevel::Warn, "started", {{"bytes", 42}, {"a", "b"}});
  set_log_rank(-1);
  const std::regex form(
      R"(libddp time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=WARN rank=3 pid=\d+ )"
      R"(event=started bytes=42 a=b)");
  REQUIRE(std::regex_match(line, form));
  REQUIRE_FALSE(contains(format_log_line(LogLevel::Info, "x", {}), "rank="));
}

TEST_CASE("Values with spaces, quotes or line ends stay one value") {
  const std::string line = format_log_line(
      LogLevel::Error, "odd event", {{"text", "a \"b\"\nc"}, {"empty", ""}, {"equals", "k=v"}});
  REQUIRE(contains(line, R"(event="odd event" text="a \"b\"\nc" empty="" equals="k=v")"));
  REQUIRE_FALSE(contains(line, "\n"));
}

TEST_CASE("Lines below the level are not written") {
  const std::string text = stderr_of([] {
    set_log_level(LogLevel::Info);
    log(LogLevel::Debug, "hidden");
    log(LogLevel::Info, "shown");
    log(LogLevel::Error, "also_shown");
    set_log_level(LogLevel::Off);
    log(LogLevel::Error, "silent");
  });
  REQUIRE(contains(text, "event=shown\n"));
  REQUIRE(contains(text, "event=also_shown\n"));
  REQUIRE_FALSE(contains(text, "hidden"));
  REQUIRE_FALSE(contains(text, "silent"));
}

TEST_CASE("The level comes from the environment") {
  // Read once per process: in children that have not logged before.
  ::setenv("LIBDDP_LOG_LEVEL", "debug", 1);
  REQUIRE(contains(stderr_of([] { log(LogLevel::Debug, "fine"); }), "event=fine"));
  ::setenv("LIBDDP_LOG_LEVEL", "loud", 1);
  const std::string text = stderr_of([] {
    log(LogLevel::Info, "info");
    log(LogLevel::Warn, "warn");
  });
  ::unsetenv("LIBDDP_LOG_LEVEL");
  REQUIRE(contains(text, "event=bad_log_level"));
  REQUIRE(contains(text, "LIBDDP_LOG_LEVEL='loud'"));
  REQUIRE(contains(text, "event=warn"));
  REQUIRE_FALSE(contains(text, "event=info"));
}

#if !defined(__SANITIZE_THREAD__)  // TSan starts no threads in a forked child
TEST_CASE("Lines of several threads do not mix") {
  const std::string text = stderr_of([] {
    set_log_level(LogLevel::Warn);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (int j = 0; j < 50; ++j) log(LogLevel::Warn, "line", {{"key", "value"}});
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::regex form("libddp time=[^ ]+ level=WARN pid=[0-9]+ event=line key=value\n");
  const std::sregex_iterator begin(text.begin(), text.end(), form);
  REQUIRE(std::distance(begin, std::sregex_iterator()) == 200);
  REQUIRE(std::count(text.begin(), text.end(), '\n') == 200);
}
#endif
