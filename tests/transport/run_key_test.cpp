#include "libddp/transport/run_key.h"

#include <fcntl.h>
#include <fmt/format.h>
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
#include "tests/support/temporary_folder.h"

using namespace libddp;
using libddp::test::contains;
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
  REQUIRE(contains(open_to_all, "its mode is 0644, so others can use it. Hint: chmod 600"));
  REQUIRE(contains(refusal(write_key(folder, kSecret, 0640)), "0640"));
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
