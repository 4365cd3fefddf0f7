#include "libddp/transport/link_hello.h"

#include <algorithm>
#include <cstring>

namespace libddp {
namespace {

void fill_token(char* field, const std::string& token) {
  std::memcpy(field, token.data(), std::min(token.size(), LinkHello::kTokenBytes));
}

bool is_token(const char* field, const std::string& token) {
  if (token.size() != LinkHello::kTokenBytes) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < LinkHello::kTokenBytes; ++i) {
    difference |= static_cast<unsigned char>(field[i]) ^ static_cast<unsigned char>(token[i]);
  }
  return difference == 0;
}

}  // namespace

LinkHello LinkHello::make(int rank, LinkKind kind, std::uint32_t index,
                          const std::string& own_token, const std::string& their_token) {
  LinkHello hello;
  hello.magic = kMagic;
  hello.version = kVersion;
  hello.rank = rank;
  hello.kind = kind;
  hello.index = index;
  fill_token(hello.own_token, own_token);
  fill_token(hello.their_token, their_token);
  return hello;
}

bool LinkHello::shows(const std::string& own, const std::string& theirs) const {
  const bool own_is_right = is_token(own_token, own);
  const bool theirs_is_right = is_token(their_token, theirs);
  return own_is_right && theirs_is_right;
}

}  // namespace libddp
