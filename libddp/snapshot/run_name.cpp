#include "libddp/snapshot/run_name.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/files.h"
#include "libddp/base/fnv.h"
#include "libddp/base/printable.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/base/unique_fd.h"
#include "libddp/slots/run_file.h"

namespace libddp {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw SnapshotError(
      fmt::format("libddp snapshot: {}: {}. Hint: look at the folder, its disk and "
                  "its permissions.",
                  printable(path), why));
}

std::string read_run(const std::string& path) {
  std::ifstream file(path);
  if (!file) return "";
  return run_in_text({std::istreambuf_iterator<char>(file), {}}, path);
}

}  // namespace

void check_run_name(const std::string& run) {
  if (run.empty() || is_run_name(run)) return;
  throw ArgumentError(
      fmt::format("libddp snapshot: run='{}' is no name of a run. Hint: at most 40 "
                  "letters, digits, '-' and '_'.",
                  printable(run)));
}

std::string run_of_folder(const std::string& folder, bool may_create) {
  const std::string path = folder + "/" + kRunFile;
  if (exists(folder) && !is_folder(folder)) refuse(folder, "it is no folder");
  if (std::string run = read_run(path); !run.empty() || !may_create) return run;
  if (const int error = make_folders(folder)) refuse(folder, std::strerror(error));
  const std::string run = random_hex(8);
  const std::string fresh = fmt::format("{}.{}", path, run);
  {
    const UniqueFd file(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    const std::string text = run + '\n';
    if (!file || ::write(file.get(), text.data(), text.size()) != std::ssize(text) ||
        ::fsync(file.get()) != 0) {
      const int number = errno;
      ::unlink(fresh.c_str());
      refuse(folder, std::strerror(number));
    }
  }
  // Of several that do it at once one wins.
  const bool is_ours = ::link(fresh.c_str(), path.c_str()) == 0;
  const int number = errno;
  ::unlink(fresh.c_str());
  if (!is_ours && number != EEXIST) refuse(path, std::strerror(number));
  return read_run(path);
}

std::string run_of_launcher() {
  for (const char* variable : {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}) {
    const auto id = env_text(variable);
    if (id && *id != "none") return is_run_name(*id) ? *id : fmt::format("job-{:016x}", fnv1a(*id));
  }
  const pid_t parent = ::getppid();
  const std::string begin = process_begin(parent);
  return fmt::format("parent-{}-{}", parent, begin.empty() ? "0" : begin);
}

}  // namespace libddp
