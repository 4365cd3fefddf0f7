#include "libddp/bootstrap/run_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <grp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "libddp/base/error.h"
#include "libddp/base/unique_fd.h"
#include "tests/support/catch.h"
#include "tests/support/expect.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/temporary_folder.h"

using namespace libddp;
using libddp::test::contains;
using libddp::test::expect;
using libddp::test::fork_ranks;
using libddp::test::message_of;
using libddp::test::TemporaryFolder;

namespace {

std::string hex_of(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

std::string write_key(const TemporaryFolder& folder, const std::string& bytes, mode_t mode) {
  const std::string path = folder.path() + "/key";
  ::unlink(path.c_str());
  std::ofstream(path) << bytes;
  ::chmod(path.c_str(), mode);
  return path;
}

/// Sets a variable for one test.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

const std::string kSecret(32, 'k');

}  // namespace

TEST_CASE("HMAC-SHA256 as RFC 4231 has it") {
  // Test cases 1 and 2.
  REQUIRE(hex_of(hmac_sha256(std::string(20, '\x0b').data(), 20, "Hi There")) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  REQUIRE(hex_of(hmac_sha256("Jefe", 4, "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  REQUIRE(equal_bytes("abc", "abc", 3));
  REQUIRE_FALSE(equal_bytes("abc", "abd", 3));
}

TEST_CASE("Tags tell lists of parts apart") {
  const auto key = RunKey::from_bytes(kSecret);
  REQUIRE(key->tag({"ab", "c"}) == key->tag({"ab", "c"}));
  REQUIRE(key->tag({"ab", "c"}) != key->tag({"a", "bc"}));
  REQUIRE(key->tag({"ab", "c"}) != RunKey::from_bytes(std::string(33, 'k'))->tag({"ab", "c"}));
  REQUIRE(key->derive({"one"})->tag({"x"}) != key->derive({"two"})->tag({"x"}));
}

TEST_CASE("A run key from a file") {
  const TemporaryFolder folder;
  const auto expected = RunKey::from_bytes(kSecret)->tag({"x"});
  REQUIRE(RunKey::from_file(write_key(folder, kSecret, 0600))->tag({"x"}) == expected);
  REQUIRE(RunKey::from_file(write_key(folder, kSecret + "\n", 0400))->tag({"x"}) == expected);

  const auto refusal = [&](const std::string& path) {
    return message_of<ArgumentError>([&] { RunKey::from_file(path); });
  };
  const std::string open_to_all = refusal(write_key(folder, kSecret, 0644));
  REQUIRE(contains(open_to_all, "its mode is 0644, so others can use it. Hint: "));
  REQUIRE(contains(refusal(write_key(folder, "short", 0600)), "it has 5 bytes, a key has 32 to"));
  REQUIRE(contains(refusal(write_key(folder, "", 0600)), "it has 0 bytes"));
  REQUIRE(contains(refusal(write_key(folder, std::string(4000, 'k'), 0600)), "it has more bytes"));
  REQUIRE(contains(refusal(folder.path() + "/none"), "No such file"));
  REQUIRE(contains(refusal(folder.path()), "it is no file"));
  REQUIRE_FALSE(contains(open_to_all, kSecret));
}

TEST_CASE("A run key of another user") {
  if (::geteuid() != 0) return;
  const TemporaryFolder folder;
  const std::string path = write_key(folder, kSecret, 0600);
  REQUIRE(::chown(path.c_str(), 65534, 65534) == 0);
  REQUIRE(contains(message_of<ArgumentError>([&] { RunKey::from_file(path); }),
                   "it belongs to user 65534, this process to user 0"));
}

namespace {

/// The message of a child of user 12345 in group 54321 that reads the key; empty if it can.
std::string message_in_container(const std::string& path) {
  const auto results = fork_ranks(1, [&](int) -> std::string {
    const gid_t group = 54321;
    expect(::setgroups(1, &group) == 0 && ::setgid(group) == 0 && ::setuid(12345) == 0, "setuid");
    try {
      const bool is_right =
          RunKey::from_file(path)->tag({"x"}) == RunKey::from_bytes(kSecret)->tag({"x"});
      return is_right ? "" : "another key";
    } catch (const ArgumentError& error) {
      return error.what();
    }
  });
  return results.at(0).text;
}

}  // namespace

TEST_CASE("A run key of root, as containers get it") {
  if (::geteuid() != 0) return;
  const TemporaryFolder folder;
  REQUIRE(::chmod(folder.path().c_str(), 0755) == 0);
  const auto message_for = [&](mode_t mode, uid_t owner = 0) {
    const std::string path = write_key(folder, kSecret, mode);
    REQUIRE(::chown(path.c_str(), owner, 54321) == 0);
    return message_in_container(path);
  };
  REQUIRE(message_for(0640) == "");
  REQUIRE(message_for(0440) == "");
  REQUIRE(message_for(0400, 12345) == "");
  REQUIRE(contains(message_for(0400), "Permission denied"));
  REQUIRE(contains(message_for(0660), "its mode is 0660, so others can use it. Hint: root's file"));
  REQUIRE(contains(message_for(0644), "its mode is 0644"));
  REQUIRE(contains(message_for(0444), "defaultMode 0440 and an fsGroup"));
  REQUIRE(
      contains(message_for(0440, 12345), "its mode is 0440, so others can use it. Hint: chmod"));
}

TEST_CASE("A run key in a volume of Kubernetes") {
  if (::geteuid() != 0) return;
  // run.key -> ..data/run.key, ..data -> ..2026_01_31, in a folder that its group may write.
  const TemporaryFolder folder;
  REQUIRE(::chmod(folder.path().c_str(), 01777) == 0);
  const std::string version = folder.path() + "/..2026_01_31";
  REQUIRE(::mkdir(version.c_str(), 0755) == 0);
  std::ofstream(version + "/run.key") << kSecret;
  REQUIRE(::chown((version + "/run.key").c_str(), 0, 54321) == 0);
  REQUIRE(::chmod((version + "/run.key").c_str(), 0440) == 0);
  REQUIRE(::symlink("..2026_01_31", (folder.path() + "/..data").c_str()) == 0);
  REQUIRE(::symlink("..data/run.key", (folder.path() + "/run.key").c_str()) == 0);
  REQUIRE(message_in_container(folder.path() + "/run.key") == "");
  ::unlink((version + "/run.key").c_str());
  ::rmdir(version.c_str());
}

TEST_CASE("A run key that the launcher passed on") {
  // The path names a process that is not there, as in a container with process ids of its own.
  const std::string path = "/proc/2147483647/fd/";
  const auto passed = [](const char* name, int seals) {
    UniqueFd memory(::memfd_create(name, MFD_ALLOW_SEALING));
    REQUIRE(::fchmod(memory.get(), 0600) == 0);
    REQUIRE(::write(memory.get(), kSecret.data(), kSecret.size()) == 32);
    REQUIRE(::fcntl(memory.get(), F_ADD_SEALS, seals) == 0);
    return memory;
  };
  constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  const auto expected = RunKey::from_bytes(kSecret)->tag({"x"});
  const int key = passed("libddp-run-key", kSeals).release();
  REQUIRE(RunKey::from_file(path + std::to_string(key))->tag({"x"}) == expected);
  REQUIRE(::fcntl(key, F_GETFD) < 0);  // what runs in this process later does not have it

  for (const UniqueFd& other : {passed("another", kSeals), passed("libddp-run-key", 0)}) {
    const std::string text =
        message_of<ArgumentError>([&] { RunKey::from_file(path + std::to_string(other.get())); });
    REQUIRE(contains(text, "the process that holds the key has ended, or is not seen from here"));
    REQUIRE(::fcntl(other.get(), F_GETFD) >= 0);
  }
}

TEST_CASE("A run key from a descriptor") {
  const auto expected = RunKey::from_bytes(kSecret)->tag({"x"});
  const UniqueFd memory(::memfd_create("libddp-test", 0));
  REQUIRE(::write(memory.get(), kSecret.data(), kSecret.size()) == 32);
  // Whoever wrote it is at its end, and several processes share the place.
  REQUIRE(RunKey::from_descriptor(memory.get())->tag({"x"}) == expected);
  REQUIRE(RunKey::from_descriptor(memory.get())->tag({"x"}) == expected);
  REQUIRE((::fcntl(memory.get(), F_GETFD) & FD_CLOEXEC) != 0);

  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  REQUIRE(::write(writing.get(), kSecret.data(), kSecret.size()) == 32);
  writing.reset();
  REQUIRE(RunKey::from_descriptor(reading.get())->tag({"x"}) == expected);
  int open_ends[2];
  REQUIRE(::pipe(open_ends) == 0);
  const UniqueFd waiting(open_ends[0]);
  const UniqueFd never_closed(open_ends[1]);
  REQUIRE(::write(never_closed.get(), kSecret.data(), kSecret.size()) == 32);
  REQUIRE(contains(message_of<ArgumentError>([&] { RunKey::from_descriptor(waiting.get()); }),
                   "its other end is neither closed nor written to"));
  REQUIRE(contains(message_of<ArgumentError>([] { RunKey::from_descriptor(1000000); }),
                   "run key from descriptor 1000000: "));
}

TEST_CASE("The run key that the environment names") {
  const TemporaryFolder folder;
  REQUIRE(given_run_key() == nullptr);
  const std::string path = write_key(folder, kSecret, 0600);
  const Variable file("LIBDDP_RUN_KEY_FILE", path);
  const auto key = given_run_key();
  REQUIRE(key->tag({"x"}) == RunKey::from_bytes(kSecret)->tag({"x"}));
  ::unlink(path.c_str());
  REQUIRE(given_run_key() == key);  // read once
  const Variable descriptor("LIBDDP_RUN_KEY_FD", "3");
  REQUIRE(contains(message_of<ArgumentError>([] { given_run_key(); }),
                   "both LIBDDP_RUN_KEY_FILE and LIBDDP_RUN_KEY_FD are set"));
}

TEST_CASE("No core dump holds the run key") {
  const auto key = RunKey::from_bytes(kSecret);
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool is_found = false;
  while (std::getline(maps, line)) {
    if (line.rfind("VmFlags:", 0) == 0 && contains(line, " dd")) is_found = true;
  }
  REQUIRE(is_found);
}
