#include "libddp/interop/gloo_engine.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "libddp/interop/inter_engine.h"

namespace libddp {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size, const std::string& address,
                                            std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(timeout);
  options->devices.push_back(Gloo::createDeviceForHostname(address));
  return c10::make_intrusive<Gloo>(store, rank, world_size, std::move(options));
}

c10::intrusive_ptr<c10d::Backend::Options> copy_of_gloo_options(
    c10::intrusive_ptr<c10d::Backend::Options> options) {
  using Options = c10d::ProcessGroupGloo::Options;
  const auto* gloos = dynamic_cast<const Options*>(options.get());
  if (gloos == nullptr) return options;
  return c10::make_intrusive<Options>(*gloos);
}

InterEngine gloo_engine() {
  return inter_engine([](const InterEngineOptions& given) {
    return make_gloo(given.store, given.rank, given.world_size, given.address, given.timeout);
  });
}

}  // namespace libddp
