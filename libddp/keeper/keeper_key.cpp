#include "libddp/keeper/keeper_key.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "libddp/base/error.h"
#include "libddp/base/system_error.h"

namespace libddp {
namespace {

constexpr int kKeySeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

UniqueFd pass_keeper_key(const RunKey& key, const std::string& run) {
  Digest digest = key.tag({"libddp keeper", run});
  // Digits, as a line end at the end of a key does not count.
  std::array<char, 2 * sizeof(digest)> text;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    text[2 * i] = "0123456789abcdef"[digest[i] >> 4];
    text[2 * i + 1] = "0123456789abcdef"[digest[i] & 15];
  }
  UniqueFd file(::memfd_create("libddp-keeper-key", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool is_written =
      file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::fcntl(file.get(), F_ADD_SEALS, kKeySeals) == 0;
  const int error = errno;
  ::explicit_bzero(text.data(), text.size());
  ::explicit_bzero(digest.data(), digest.size());
  if (is_written) return file;
  throw Error(fmt::format("libddp snapshot: no memory file for the key of the keeper: {}.",
                          errno_text("memfd_create", error)));
}

std::shared_ptr<const RunKey> take_keeper_key(const UniqueFd& passed) {
  // Nothing else has seals, so nothing makes the keeper wait for a key.
  const int seals = passed ? ::fcntl(passed.get(), F_GET_SEALS) : -1;
  if (seals < 0 || (seals & kKeySeals) != kKeySeals) {
    throw SnapshotError("libddp snapshot: what came in place of a run key is no sealed memory.");
  }
  return RunKey::from_descriptor(passed.get());
}

}  // namespace libddp
