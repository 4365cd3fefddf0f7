#include "tests/support/temporary_folder.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <stdexcept>

namespace libddp::test {

std::set<std::string> list_folder(const std::string& path) {
  std::set<std::string> names;
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) throw std::runtime_error("cannot list " + path);
  while (const dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.insert(name);
  }
  ::closedir(folder);
  return names;
}

TemporaryFolder::TemporaryFolder() : owner_(::getpid()) {
  const char* base = ::getenv("TMPDIR");
  path_ = std::string(base != nullptr ? base : "/tmp") + "/libddp-test-XXXXXX";
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
}

TemporaryFolder::~TemporaryFolder() {
  if (owner_ != ::getpid()) return;
  for (const std::string& name : list_folder(path_)) ::unlink((path_ + "/" + name).c_str());
  ::rmdir(path_.c_str());
}

}  // namespace libddp::test
