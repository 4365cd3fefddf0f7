#pragma once

// A folder for the files of one test.
//
//   TemporaryFolder folder;
//   std::ofstream(folder.path() + "/store") << "text";

#include <sys/types.h>

#include <set>
#include <string>

namespace libddp::test {

/// Names of the entries of a folder.
std::set<std::string> list_folder(const std::string& path);

/// A folder of its own under the system's temporary folder, removed with all that is in it by
/// the process that made it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  bool is_empty() const { return list_folder(path_).empty(); }

 private:
  std::string path_;
  pid_t owner_;
};

}  // namespace libddp::test
