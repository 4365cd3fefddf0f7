#include "libddp/bootstrap/crypto.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <initializer_list>
#include <string>

#include "libddp/base/error.h"

namespace libddp {
namespace {

// Both major versions have these with these types (openssl/evp.h, hmac.h, crypto.h).
struct CryptoTable {
  const void* (*sha256)() = nullptr;
  unsigned char* (*hmac)(const void* type, const void* key, int key_bytes,
                         const unsigned char* data, std::size_t bytes, unsigned char* digest,
                         unsigned int* digest_bytes) = nullptr;
  int (*compare)(const void* one, const void* other, std::size_t bytes) = nullptr;
  std::string problem;

  bool is_whole() const { return sha256 != nullptr && hmac != nullptr && compare != nullptr; }
};

template <typename Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

CryptoTable load_crypto() {
  CryptoTable table;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    // Never closed: libcrypto registers handlers that run when the process ends.
    void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = ::dlerror();
      table.problem +=
          fmt::format("{}{}", table.problem.empty() ? "" : "; ", reason == nullptr ? name : reason);
      continue;
    }
    look_up(library, "EVP_sha256", table.sha256);
    look_up(library, "HMAC", table.hmac);
    look_up(library, "CRYPTO_memcmp", table.compare);
    if (table.is_whole()) return table;
    table.problem += fmt::format("{}: no HMAC in it; ", name);
  }
  return table;
}

const CryptoTable& crypto() {
  static const CryptoTable table = load_crypto();
  return table;
}

}  // namespace

bool has_crypto() { return crypto().is_whole(); }

void require_crypto() {
  if (has_crypto()) return;
  throw StateError(fmt::format(
      "libddp: a run key was given, but OpenSSL's libcrypto, which checks it, cannot be loaded "
      "({}). Hint: install OpenSSL 3 or 1.1 (Debian: libssl3, conda: openssl), or start without a "
      "key.",
      crypto().problem));
}

Digest hmac_sha256(const void* key, std::size_t key_bytes, std::string_view message) {
  require_crypto();
  Digest digest{};
  unsigned int size = 0;
  const auto* data = reinterpret_cast<const unsigned char*>(message.data());
  const unsigned char* done = crypto().hmac(crypto().sha256(), key, static_cast<int>(key_bytes),
                                            data, message.size(), digest.data(), &size);
  if (done == nullptr || size != digest.size()) {
    throw StateError(
        "libddp: OpenSSL's libcrypto cannot compute HMAC-SHA256. Hint: look at its configuration "
        "(OPENSSL_CONF); the default provider must be there.");
  }
  return digest;
}

bool equal_bytes(const void* one, const void* other, std::size_t bytes) {
  require_crypto();
  return crypto().compare(one, other, bytes) == 0;
}

}  // namespace libddp
