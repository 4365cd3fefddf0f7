#include "libddp/training/module_parts.h"

#include <utility>

#include "libddp/fsdp/wrapped_module.h"
#include "libddp/module/module_tensors.h"

namespace libddp {

ModuleParts ModuleParts::of(const torch::nn::Module& module) {
  const auto owned = WrappedModule::owned_parts(module);
  ModuleParts parts;
  const auto add = [&](const NamedTensor& named, bool is_buffer) {
    if (!named.tensor.defined()) return;
    const void* const key = named.tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = parts.places.emplace(key, parts.tensors.size());
    if (!is_new) {
      parts.aliases[named.name] = parts.tensors[known->second].name;
      return;
    }
    ModulePart part;
    part.name = named.name;
    part.tensor = named.tensor;
    part.is_buffer = is_buffer;
    if (const auto own = owned.find(key); own != owned.end()) {
      part.shape = own->second.shape;
      part.begin = own->second.begin;
      part.end = own->second.end;
      part.is_sharded = own->second.is_sharded;
    } else {
      part.shape = named.tensor.sizes().vec();
      part.end = named.tensor.numel();
    }
    parts.tensors.push_back(std::move(part));
  };
  for (const NamedTensor& each : registered_parameters(module)) add(each, /*is_buffer=*/false);
  for (const NamedTensor& each : named_buffers(module)) add(each, /*is_buffer=*/true);
  return parts;
}

}  // namespace libddp
