// The addresses of a rendezvous as users write them (rendezvous_url.h).

#include "libddp/rendezvous/rendezvous_url.h"

#include "libddp/base/error.h"
#include "tests/fuzz/fuzz.h"

using namespace libddp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text = fuzz::Bytes(data, size).rest();
  try {
    const RendezvousUrl url = RendezvousUrl::parse(text);
    fuzz::require(url.is_tcp ? !url.host.empty() && url.port > 0 : url.path.front() == '/');
  } catch (const ArgumentError&) {
  }
  return 0;
}
