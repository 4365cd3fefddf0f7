// The count beside a rendezvous file, where somebody else was in the folder first.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>

#include "libddp/base/unique_fd.h"
#include "libddp/rendezvous/rendezvous_file.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using namespace libddp::test;

namespace {

const std::string kPrecious = "what the user cannot do without";

std::string content(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

bool exists(const std::string& path) {
  struct stat facts {};
  return ::lstat(path.c_str(), &facts) == 0;
}

/// `ranks` of a world of two open the file and leave it again.
void open_and_leave(const std::string& path, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    c10::make_intrusive<RendezvousFile>(path, 2)->set("key", std::vector<std::uint8_t>{1});
  }
}

}  // namespace

TEST_CASE("the last rank takes the rendezvous file away", "[rendezvous]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  open_and_leave(path, 1);
  REQUIRE(exists(path));
  open_and_leave(path, 1);
  REQUIRE(folder.is_empty());
}

TEST_CASE("a count that is a link is not followed", "[rendezvous]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  const std::string precious = folder.path() + "/precious";
  write(precious, kPrecious);
  SECTION("symbolic") { REQUIRE(::symlink(precious.c_str(), (path + ".left").c_str()) == 0); }
  SECTION("hard") { REQUIRE(::link(precious.c_str(), (path + ".left").c_str()) == 0); }
  SECTION("symbolic, to nothing yet") {
    REQUIRE(::symlink((folder.path() + "/new").c_str(), (path + ".left").c_str()) == 0);
  }
  open_and_leave(path, 2);
  REQUIRE(content(precious) == kPrecious);
  REQUIRE_FALSE(exists(folder.path() + "/new"));
  REQUIRE(exists(path + ".left"));
}

TEST_CASE("a file that is no count stays as it is", "[rendezvous]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  SECTION("a text") {
    write(path + ".left", kPrecious);
    open_and_leave(path, 2);
    REQUIRE(content(path + ".left") == kPrecious);
  }
  SECTION("a pipe, which nobody writes into") {
    REQUIRE(::mkfifo((path + ".left").c_str(), 0600) == 0);
    open_and_leave(path, 2);
    REQUIRE(exists(path + ".left"));
  }
  SECTION("another user's") {
    if (::geteuid() != 0) return;  // only root can give files away
    write(path + ".left", "");
    REQUIRE(::chown((path + ".left").c_str(), 12345, 12345) == 0);
    open_and_leave(path, 2);
    REQUIRE(content(path + ".left").empty());
  }
}

TEST_CASE("a rank leaves although another holds the count's lock", "[rendezvous]") {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/store";
  const UniqueFd holder(::open((path + ".left").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  REQUIRE(::flock(holder.get(), LOCK_EX) == 0);
  ::alarm(60);  // what hangs here hangs for ever
  const auto start = std::chrono::steady_clock::now();
  open_and_leave(path, 1);
  ::alarm(0);
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(50));
  REQUIRE(exists(path));
}
