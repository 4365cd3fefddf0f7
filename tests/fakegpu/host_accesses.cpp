// Tells the race checker what the host does with pinned memory: each of torch's operators on CPU
// tensors there, in whatever thread, as the profiler would see it. Operators that another one is
// made of are seen by themselves, so only those count that have a kernel. What reads or writes such
// memory without an operator of torch's is not seen.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/fakegpu/access_log.h"
#include "tests/fakegpu/pinned_allocator.h"
#include "tests/fakegpu/storage.h"

namespace fakegpu {
namespace {

enum class Use : std::uint8_t { Nothing, Read, Write };

/// Of an operator's arguments; empty where it touches no memory.
using Uses = std::vector<Use>;

Uses find_uses(const c10::OperatorName& name) {
  // A copy's kernel is for all devices; the others change what a tensor is, and no bytes.
  static const auto* const only_shapes =
      new std::set<std::string>{"aten::set_", "aten::resize_", "aten::empty_like"};
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  const bool has_kernel =
      op && (name.name == "aten::copy_" || op->hasKernelForDispatchKey(c10::DispatchKey::CPU));
  if (!has_kernel || only_shapes->count(name.name) > 0) return {};
  Uses uses;
  for (const c10::Argument& argument : op->schema().arguments()) {
    const c10::AliasInfo* const alias = argument.alias_info();
    // What is given back as a view is not looked at.
    uses.push_back(alias == nullptr ? Use::Read : alias->isWrite() ? Use::Write : Use::Nothing);
  }
  return uses;
}

const Uses& uses_of(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, Uses>;
  const std::lock_guard lock(mutex);
  const std::string key = name.name + "." + name.overload_name;
  const auto found = known->find(key);
  return found != known->end() ? found->second : known->emplace(key, find_uses(name)).first->second;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.has_storage() &&
         PinnedAllocator::get().owns(tensor.storage().data());
}

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& call) {
  bool is_any_pinned = false;
  for (const c10::IValue& value : call.inputs()) {
    for (const at::Tensor& tensor : tensors_in(value)) {
      if (is_on_device(tensor)) return nullptr;  // its own to tell
      is_any_pinned = is_any_pinned || is_pinned(tensor);
    }
  }
  const auto name = is_any_pinned ? call.operator_name() : std::nullopt;
  if (!name) return nullptr;
  const Uses& uses = uses_of(*name);
  std::vector<ByteRange> reads;
  std::vector<ByteRange> writes;
  for (std::size_t i = 0; i < uses.size() && i < call.inputs().size(); ++i) {
    if (uses[i] == Use::Nothing) continue;
    for (const at::Tensor& tensor : tensors_in(call.inputs()[i])) {
      if (is_pinned(tensor)) add_ranges(tensor, uses[i] == Use::Write ? writes : reads);
    }
  }
  AccessLog::get().host_uses(name->name, reads, writes);
  return nullptr;
}

[[maybe_unused]] const bool is_registered = [] {
  at::addGlobalCallback(
      at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  return true;
}();

}  // namespace
}  // namespace fakegpu
