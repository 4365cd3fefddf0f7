#include "libddp/fsdp/fully_shard.h"

#include <fmt/format.h>

#include "libddp/base/error.h"

namespace libddp {
namespace {

/// Stands in a Sequential's list of what to run; its child, and so the owner of the parameters,
/// stays the module itself.
class ShardedElement : public torch::nn::Module {
 public:
  explicit ShardedElement(torch::nn::AnyModule module) : module_(std::move(module)) {}

  at::Tensor forward(const at::Tensor& input) {
    const auto wrapped = WrappedModule::find(*module_.ptr());
    if (!wrapped) return module_.forward(input);  // the model around it has ended
    return wrapped->run([&] { return module_.forward(in_dtype(input, wrapped->input_dtype())); });
  }

 private:
  torch::nn::AnyModule module_;
};

}  // namespace

void fully_shard_each(torch::nn::SequentialImpl& sequential, const ShardOptions& options) {
  std::size_t index = 0;
  for (torch::nn::AnyModule& element : sequential) {
    const std::shared_ptr<torch::nn::Module> module = element.ptr();
    const std::string name = fmt::format("{} ({})", index++, module->name());
    if (dynamic_cast<const ShardedElement*>(module.get()) != nullptr) {
      throw ArgumentError(
          fmt::format("libddp fsdp: element {} of the Sequential is wrapped already. Hint: call "
                      "fully_shard_each once.",
                      name));
    }
    if (module->parameters().empty()) continue;
    fully_shard(module, options, name);
    element = torch::nn::AnyModule(std::make_shared<ShardedElement>(std::move(element)));
  }
}

}  // namespace libddp
