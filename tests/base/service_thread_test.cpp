#include "libddp/base/service_thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "tests/support/catch.h"

using namespace libddp;

namespace {

int niceness() { return ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid))); }

}  // namespace

TEST_CASE("a service thread is named and hears no signals", "[base]") {
  std::string name(16, '\0');
  sigset_t heard{};
  start_service_thread("libddp-a-long-name", [&] {
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    ::pthread_sigmask(SIG_SETMASK, nullptr, &heard);
  }).join();
  REQUIRE(std::string(name.c_str()) == "libddp-a-long-n");
  for (const int number : {SIGINT, SIGTERM, SIGUSR1}) REQUIRE(::sigismember(&heard, number) == 1);
  sigset_t own{};
  ::pthread_sigmask(SIG_SETMASK, nullptr, &own);
  REQUIRE(::sigismember(&own, SIGINT) == 0);
}

TEST_CASE("a thread that gives way starts others that do, and its process does not", "[base]") {
  const int before = niceness();
  int own = 0;
  int started = 0;
  start_service_thread("a", [&] {
    give_way();
    own = niceness();
    start_service_thread("b", [&] { started = niceness(); }).join();
  }).join();
  REQUIRE(own == 19);
  REQUIRE(started == 19);
  REQUIRE(niceness() == before);
}
