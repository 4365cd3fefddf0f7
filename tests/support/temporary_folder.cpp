#include "tests/support/temporary_folder.h"

#include <ftw.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <vector>

#include "libddp/base/files.h"

namespace libddp::test {

std::set<std::string> list_folder(const std::string& path) {
  std::vector<std::string> names;
  if (list_names(path, names) != 0) throw std::runtime_error("cannot list " + path);
  return {names.begin(), names.end()};
}

TemporaryFolder::TemporaryFolder() : owner_(::getpid()) {
  const char* base = ::getenv("TMPDIR");
  path_ = std::string(base != nullptr ? base : "/tmp") + "/libddp-test-XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
}

TemporaryFolder::~TemporaryFolder() {
  if (owner_ != ::getpid()) return;
  constexpr int kOpenFolders = 16;
  const auto remove = [](const char* path, const struct stat*, int, FTW*) {
    ::remove(path);
    return 0;
  };
  ::nftw(path_.c_str(), remove, kOpenFolders, FTW_DEPTH | FTW_PHYS);
}

}  // namespace libddp::test
