#include "tests/support/folder_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/interrupt.h"
#include "libddp/base/unique_fd.h"

namespace libddp::test {

std::string FolderStore::path_of(const std::string& key) const {
  std::string file_name = key;
  for (char& c : file_name) {
    if (c == '/') c = '%';
  }
  return folder_.path() + "/k." + file_name;
}

void FolderStore::set(const std::string& key, const std::string& value) {
  // Written aside and renamed: a reader sees the whole value or none.
  std::ostringstream aside;
  aside << folder_.path() << "/t." << ::getpid() << '.' << std::this_thread::get_id();
  std::ofstream(aside.str()) << value;
  if (std::rename(aside.str().c_str(), path_of(key).c_str()) != 0) {
    throw StoreError("FolderStore: cannot write " + path_of(key));
  }
}

std::optional<std::string> FolderStore::try_get(const std::string& key) {
  std::ifstream file(path_of(key));
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::string> FolderStore::wait_get(const std::string& key, Deadline deadline) {
  for (;;) {
    if (auto value = try_get(key)) return value;
    if (deadline.expired()) return std::nullopt;
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

long FolderStore::add(const std::string& key, long amount) {
  const UniqueFd lock(
      ::open((folder_.path() + "/lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  if (!lock || ::flock(lock.get(), LOCK_EX) != 0) throw StoreError("FolderStore: flock failed");
  const auto value = try_get(key);
  const long sum = (value ? std::stol(*value) : 0) + amount;
  set(key, std::to_string(sum));
  return sum;
}

void FolderStore::remove(const std::string& key) { ::unlink(path_of(key).c_str()); }

}  // namespace libddp::test
