#include "libddp/base/files.h"

#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string_view>

namespace libddp {
namespace {

/// The names between the slashes.
std::vector<std::string_view> split(std::string_view path) {
  std::vector<std::string_view> names;
  while (true) {
    const std::size_t slash = path.find('/');
    names.push_back(path.substr(0, slash));
    if (slash == std::string_view::npos) return names;
    path.remove_prefix(slash + 1);
  }
}

/// Nothing where it has been removed.
std::optional<std::string> current_folder() {
  std::string path(PATH_MAX, '\0');
  if (::getcwd(path.data(), path.size()) == nullptr) return std::nullopt;
  return path.c_str();
}

/// 0 where it is there already.
int make_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0777) == 0) return 0;
  const int error = errno;
  if (error != EEXIST) return error;
  return is_folder(folder) ? 0 : ENOTDIR;
}

}  // namespace

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string absolute_path(const std::string& path) {
  const auto current = path.starts_with('/') ? "" : current_folder();
  if (!current) return path;
  const std::string whole = *current + "/" + path;
  std::vector<std::string_view> kept;
  for (const std::string_view name : split(whole)) {
    if (name.empty() || name == ".") continue;
    if (name != "..") {
      kept.push_back(name);
    } else if (!kept.empty()) {
      kept.pop_back();
    }
  }
  std::string found;
  for (const std::string_view name : kept) found.append("/").append(name);
  return found.empty() ? "/" : found;
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

int list_names(const std::string& folder, std::vector<std::string>& names) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), &::closedir);
  if (!open) return errno;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(open.get());
    if (entry == nullptr) return errno;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

int make_folders(const std::string& folder) {
  const int error = make_folder(folder);
  const std::string parent = folder_of(folder);
  if (error != ENOENT || parent == folder || parent == ".") return error;
  if (const int above = make_folders(parent)) return above;
  return make_folder(folder);
}

int remove_tree(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return 0;
  const int error = errno;
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return error;
  std::vector<std::string> names;
  if (const int unread = list_names(path, names)) return unread == ENOENT ? 0 : unread;
  for (const std::string& name : names) {
    if (const int left = remove_tree(path + "/" + name)) return left;
  }
  return ::rmdir(path.c_str()) == 0 || errno == ENOENT ? 0 : errno;
}

}  // namespace libddp
