#include "tests/bench/mpi_store.h"

#include <fcntl.h>
#include <mpi.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "libddp/base/error.h"
#include "libddp/base/unique_fd.h"

namespace libddp::bench {
namespace fs = std::filesystem;

MpiStore::MpiStore() {
  char folder[256] = {};
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  if (rank_ == 0) {
    const std::string pattern = (fs::temp_directory_path() / "libddp-mpi-XXXXXX").string();
    pattern.copy(folder, sizeof(folder) - 1);
    if (::mkdtemp(folder) == nullptr) folder[0] = '\0';
  }
  MPI_Bcast(folder, sizeof(folder), MPI_CHAR, 0, MPI_COMM_WORLD);
  if (folder[0] == '\0') throw StoreError("MpiStore: rank 0 cannot make a temporary folder");
  folder_ = folder;
}

MpiStore::~MpiStore() {
  MPI_Barrier(MPI_COMM_WORLD);
  std::error_code ignored;
  if (rank_ == 0) fs::remove_all(folder_, ignored);
}

std::string MpiStore::path_of(std::string key) const {
  std::replace(key.begin(), key.end(), '/', '%');
  return folder_ + "/key-" + key;
}

void MpiStore::set(const std::string& key, const std::string& value) {
  const std::string aside = folder_ + "/new-" + std::to_string(rank_);
  std::ofstream(aside) << value;
  fs::rename(aside, path_of(key));
}

std::optional<std::string> MpiStore::try_get(const std::string& key) {
  std::ifstream file(path_of(key));
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<std::string> MpiStore::wait_get(const std::string& key, Deadline deadline) {
  while (!deadline.expired()) {
    if (auto value = try_get(key)) return value;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return std::nullopt;
}

long MpiStore::add(const std::string& key, long amount) {
  const UniqueFd lock(::open((folder_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (::flock(lock.get(), LOCK_EX) != 0) throw StoreError("MpiStore: cannot lock the folder");
  const long sum = std::stol(try_get(key).value_or("0")) + amount;
  set(key, std::to_string(sum));
  return sum;
}

void MpiStore::remove(const std::string& key) {
  std::error_code ignored;
  fs::remove(path_of(key), ignored);
}

}  // namespace libddp::bench
