#pragma once

// Folders and paths. Not std::filesystem: the libtorch of torch 2.11 exports symbols of an older
// one, which a process then calls in the place of its own, and crashes. Thread rule: any thread.
//
//   if (const int error = make_folders("out/run")) throw ...(errno_text("mkdir", error));

#include <string>
#include <vector>

namespace libddp {

/// The folder that a path is in; "." for a name alone.
std::string folder_of(const std::string& path);

/// From the root, without ".", ".." and a slash at its end; links are not followed. As it is where
/// the current folder has been removed.
std::string absolute_path(const std::string& path);

bool exists(const std::string& path);
bool is_folder(const std::string& path);

// The rest returns 0, or the errno of what the system refused.

/// The entries of a folder, without "." and "..".
int list_names(const std::string& folder, std::vector<std::string>& names);

/// That folder, and those that it is in, where they are missing.
int make_folders(const std::string& folder);

/// A file, a link, or a folder with all that is in it; what is not there is none.
int remove_tree(const std::string& path);

}  // namespace libddp
