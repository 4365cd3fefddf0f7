#include "libddp/base/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"
#include "libddp/base/unique_fd.h"

namespace libddp {
namespace {

[[noreturn]] void refuse_file(const std::string& path, const char* call, int code) {
  throw Error(
      fmt::format("libddp: cannot write {}: {}. Hint: is the folder there, writable, and "
                  "not full?",
                  path, errno_text(call, code)));
}

}  // namespace

void write_whole_file(const std::string& path, std::string_view text) {
  const std::string draft = fmt::format("{}.{}.tmp", path, ::getpid());
  UniqueFd file(::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) refuse_file(draft, "open", errno);
  while (!text.empty()) {
    const ssize_t written = ::write(file.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int code = errno;
      ::unlink(draft.c_str());
      refuse_file(draft, "write", code);
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::rename(draft.c_str(), path.c_str()) == 0) return;
  const int code = errno;
  ::unlink(draft.c_str());
  refuse_file(path, "rename", code);
}

}  // namespace libddp
