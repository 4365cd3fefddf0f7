// The one main of every test program.

#if __has_include(<catch2/catch.hpp>)
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#else
#include <catch2/catch_session.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>

int main(int argc, char** argv) { return Catch::Session().run(argc, argv); }
#endif

#include <unistd.h>

#include <cstdio>
#include <thread>

namespace {

#if __has_include(<catch2/catch.hpp>)
using Listener = Catch::TestEventListenerBase;
using AfterAssertion = bool;
#else
using Listener = Catch::EventListenerBase;
using AfterAssertion = void;
#endif

/// Ends the program at the first assertion of Catch2 in a rank's thread or process. There it is a
/// data race that crashes one run in a hundred, or a failure that nobody sees: see expect.h.
class AssertionGuard final : public Listener {
 public:
#if __has_include(<catch2/catch.hpp>)
  using Listener::Listener;
#else
  explicit AssertionGuard(const Catch::IConfig* config) : Listener(config) {
    m_preferences.shouldReportAllAssertions = true;
  }
#endif

  void assertionStarting(const Catch::AssertionInfo& assertion) override { look(assertion); }
  AfterAssertion assertionEnded(const Catch::AssertionStats& stats) override {
    look(stats.assertionResult.getSourceInfo());
    return AfterAssertion();
  }

 private:
  void look(const Catch::AssertionInfo& assertion) { look(assertion.lineInfo); }
  void look(const Catch::SourceLineInfo& line) {
    if (std::this_thread::get_id() == thread_ && ::getpid() == process_) return;
    std::fprintf(stderr,
                 "%s:%zu: an assertion of Catch2 in a rank's thread or process: use expect or "
                 "message_of of tests/support/expect.h there\n",
                 line.file, line.line);
    ::_exit(1);
  }

  std::thread::id thread_ = std::this_thread::get_id();
  pid_t process_ = ::getpid();
};

CATCH_REGISTER_LISTENER(AssertionGuard)

}  // namespace
