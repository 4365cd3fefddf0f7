#include "libddp/snapshot/run_name.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "libddp/base/env.h"
#include "libddp/base/error.h"
#include "libddp/base/fnv.h"
#include "libddp/base/printable.h"
#include "libddp/base/process.h"
#include "libddp/base/random.h"
#include "libddp/base/unique_fd.h"
#include "libddp/slots/run_file.h"

namespace libddp {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw SnapshotError(
      fmt::format("libddp snapshot: {}: {}. Hint: look at the folder, its disk and "
                  "its permissions.",
                  printable(path.string()), why));
}

std::string read_run(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return "";
  return run_in_text({std::istreambuf_iterator<char>(file), {}}, path.string());
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
  const fs::path path = fs::path(folder) / kRunFile;
  std::error_code error;
  if (fs::exists(folder, error) && !fs::is_directory(folder, error)) {
    refuse(folder, "it is no folder");
  }
  if (std::string run = read_run(path); !run.empty() || !may_create) return run;
  fs::create_directories(folder, error);
  if (error) refuse(folder, error.message());
  const std::string run = random_hex(8);
  const std::string fresh = fmt::format("{}.{}", path.string(), run);
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

std::string absolute_folder(const std::string& folder) {
  std::error_code error;
  const fs::path path = fs::absolute(folder, error);
  return error ? folder : path.lexically_normal().string();
}

}  // namespace libddp
