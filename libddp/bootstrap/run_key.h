#pragma once

// The secret of a run: who has it may join. With it the entries of the store are authenticated
// (sealed_store.h) and every connection between hosts begins with a proof (link_handshake.h).
//
// It comes from a file of the user's (LIBDDP_RUN_KEY_FILE) or from an inherited descriptor
// (LIBDDP_RUN_KEY_FD), never from an argument or the value of a variable. Its bytes stand in a page
// of their own that no core dump holds, are wiped at the end, and never appear in messages.
// Thread rule: immutable; any thread.
//
//   std::shared_ptr<const RunKey> key = given_run_key();       // null if none was given
//   Digest tag = key->tag({"libddp link", group, nonce});      // HMAC-SHA256 over all parts

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include "libddp/bootstrap/crypto.h"

namespace libddp {

class RunKey {
 public:
  static constexpr std::size_t kMinBytes = 32;
  static constexpr std::size_t kMaxBytes = 2048;

  /// Throws ArgumentError unless there are 32 to 2048 bytes; StateError without libcrypto.
  static std::shared_ptr<const RunKey> from_bytes(std::string_view bytes);
  /// As from_bytes, without line ends at the end of the file. The file must be of this user and
  /// open to nobody else (mode 0600 or 0400), or of root and open to its group at most (0640,
  /// 0440), as secrets are mounted into containers; a path may lead to it over symbolic links. A
  /// path that names the descriptor of another process ("/proc/7/fd/3") is this process's own
  /// descriptor of that number where `libddp run` has passed its key on; it is closed then.
  static std::shared_ptr<const RunKey> from_file(const std::string& path);
  /// Reads a file or memfd from its start, anything else to its end; from now on programs that this
  /// process starts do not get the descriptor.
  static std::shared_ptr<const RunKey> from_descriptor(int descriptor);

  ~RunKey();
  RunKey(const RunKey&) = delete;
  RunKey& operator=(const RunKey&) = delete;

  /// HMAC-SHA256 over the parts and their lengths, so that no two lists of parts are alike.
  Digest tag(std::initializer_list<std::string_view> parts) const;
  /// A key for one purpose: the tag of `parts`.
  std::shared_ptr<const RunKey> derive(std::initializer_list<std::string_view> parts) const;

 private:
  RunKey();
  void read_all(int descriptor, const std::string& source);
  void check_size(const std::string& source) const;

  unsigned char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

/// The key that the environment names, read once per process; null if it names none. Throws
/// ArgumentError if it cannot be used, or if both variables are set.
std::shared_ptr<const RunKey> given_run_key();

/// LIBDDP_REQUIRE_KEY=1: groups that are created across hosts without a key are errors.
bool is_run_key_required();

}  // namespace libddp
