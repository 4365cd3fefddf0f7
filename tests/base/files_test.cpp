#include "libddp/base/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

TEST_CASE("paths are taken apart as the system does it", "[base]") {
  REQUIRE(folder_of("name") == ".");
  REQUIRE(folder_of("/name") == "/");
  REQUIRE(folder_of("/a/b/name") == "/a/b");
  REQUIRE(folder_of("a/name") == "a");

  REQUIRE(absolute_path("/") == "/");
  REQUIRE(absolute_path("/a//b/./c/../d/") == "/a/b/d");
  REQUIRE(absolute_path("/../../a") == "/a");
  REQUIRE(absolute_path("/a/..") == "/");
  char here[4096];
  REQUIRE(::getcwd(here, sizeof here) != nullptr);
  REQUIRE(absolute_path("out/run") == std::string(here) + "/out/run");
  REQUIRE(absolute_path(".") == here);
}

TEST_CASE("folders are made with those above them, and listed", "[base]") {
  TemporaryFolder place;
  const std::string folder = place.path() + "/a/b/c";
  REQUIRE(!exists(folder));
  REQUIRE(make_folders(folder) == 0);
  REQUIRE(make_folders(folder + "/") == 0);
  REQUIRE(is_folder(folder));
  std::ofstream(folder + "/file") << "text";
  REQUIRE(exists(folder + "/file"));
  REQUIRE(!is_folder(folder + "/file"));
  REQUIRE(make_folders(folder + "/file") == ENOTDIR);
  REQUIRE(make_folders(folder + "/file/d") == ENOTDIR);
  REQUIRE(make_folders("/proc/libddp/d") == ENOENT);

  std::vector<std::string> names;
  REQUIRE(list_names(folder, names) == 0);
  REQUIRE(names == std::vector<std::string>{"file"});
  REQUIRE(list_names(folder + "/none", names) == ENOENT);
  REQUIRE(list_names(folder + "/file", names) == ENOTDIR);
  REQUIRE(remove_tree(place.path() + "/a") == 0);
}

TEST_CASE("a tree goes as a whole, and links in it lead nowhere", "[base]") {
  TemporaryFolder place;
  const std::string kept = place.path() + "/kept";
  const std::string tree = place.path() + "/tree";
  REQUIRE(make_folders(kept) == 0);
  std::ofstream(kept + "/file") << "text";
  REQUIRE(make_folders(tree + "/deep/er") == 0);
  std::ofstream(tree + "/deep/file") << "text";
  REQUIRE(::symlink(kept.c_str(), (tree + "/deep/er/link").c_str()) == 0);
  REQUIRE(::symlink("nowhere", (tree + "/dangling").c_str()) == 0);
  REQUIRE(remove_tree(tree) == 0);
  REQUIRE(!exists(tree));
  REQUIRE(exists(kept + "/file"));

  REQUIRE(remove_tree(tree) == 0);
  REQUIRE(remove_tree(kept + "/file") == 0);
  REQUIRE(list_folder(kept).empty());
  REQUIRE(remove_tree(kept) == 0);
  REQUIRE(remove_tree("/proc/self/status") != 0);
}
