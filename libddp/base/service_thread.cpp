#include "libddp/base/service_thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace libddp {
namespace {

/// Blocks all signals in the calling thread: a new thread inherits the mask.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

std::thread start_service_thread(const std::string& name, std::function<void()> body) {
  AllSignalsBlocked blocked;
  return std::thread([short_name = name.substr(0, 15), body = std::move(body)] {
    ::pthread_setname_np(::pthread_self(), short_name.c_str());
    body();
  });
}

void give_way() noexcept {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 19);  // else as before
}

}  // namespace libddp
