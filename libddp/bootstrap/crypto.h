#pragma once

// The few functions of OpenSSL's libcrypto that proofs of the run key need, found at run time:
// nothing is linked, and nothing is looked for before a key is given. No cryptography of our own.
// Thread rule: free functions; any thread.
//
//   require_crypto();                                  // StateError where there is no libcrypto
//   Digest tag = hmac_sha256(key, sizeof(key), "text");
//   if (!equal_bytes(tag.data(), theirs.data(), tag.size())) refuse();

#include <array>
#include <cstddef>
#include <string_view>

namespace libddp {

/// A SHA-256 digest.
using Digest = std::array<unsigned char, 32>;

/// Whether libcrypto.so.3 or libcrypto.so.1.1 can be loaded and has what is needed.
bool has_crypto();

/// Throws StateError that says what was looked for, if it is not there.
void require_crypto();

Digest hmac_sha256(const void* key, std::size_t key_bytes, std::string_view message);

/// Takes as long for a first difference as for a last one.
bool equal_bytes(const void* one, const void* other, std::size_t bytes);

}  // namespace libddp
