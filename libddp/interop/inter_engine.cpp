#include "libddp/interop/inter_engine.h"

#include <fmt/format.h>

#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "libddp/base/error.h"
#include "libddp/base/random.h"
#include "libddp/host/inter_stage_factory.h"
#include "libddp/interop/c10d_failure.h"
#include "libddp/interop/c10d_stage.h"

namespace libddp {
namespace {

/// A word of host 0: keys that an earlier group of this name left in the store are not read.
std::string agree_on_prefix(InterStage& links, InterPlace place) {
  std::string word = random_hex(8);
  CommCall call;
  call.description.kind = OpKind::Broadcast;
  call.description.root = 0;
  call.description.count = word.size();
  std::snprintf(call.description.label, sizeof(call.description.label), "creation, inter");
  call.timeout = kInterJoin;
  links.begin(call);
  links.broadcast(reinterpret_cast<std::byte*>(word.data()), word.size(), 0);
  return fmt::format("inter/{}/{}", place.leader, word);
}

void check_engine(const GroupIdentity& identity, const c10::intrusive_ptr<c10d::Backend>& engine,
                  InterPlace place) {
  const std::string what =
      !engine ? "gave nothing"
              : fmt::format("has rank {} of {}", engine->getRank(), engine->getSize());
  if (engine && engine->getRank() == place.host && engine->getSize() == place.num_hosts) return;
  throw ArgumentError(fmt::format(
      "{} inter: the engine {}, but leader {} is on host {} of {}. Hint: an engine joins one rank "
      "per host, in the order of the hosts.",
      identity.where(), what, place.leader, place.host, place.num_hosts));
}

class C10dStageFactory : public InterStageFactory {
 public:
  explicit C10dStageFactory(InterBackendMaker make) : make_(std::move(make)) {}

  std::unique_ptr<InterStage> make(ShmComm& local, InterPlace place,
                                   std::unique_ptr<InterStage> links,
                                   const InterStageRequest& request) const override {
    InterEngineOptions options;
    options.store = c10::make_intrusive<c10d::PrefixStore>(
        request.prefix + agree_on_prefix(*links, place), request.store);
    options.rank = place.host;
    options.world_size = place.num_hosts;
    options.address = request.address;
    options.timeout =
        std::chrono::ceil<std::chrono::milliseconds>(request.deadline.remaining(request.timeout));
    c10::intrusive_ptr<c10d::Backend> engine;
    try {
      engine = make_(options);
    } catch (...) {
      std::rethrow_exception(error_of_c10d(std::current_exception(),
                                           request.identity.where() + " inter",
                                           "joining from " + options.address));
    }
    check_engine(request.identity, engine, place);
    return std::make_unique<C10dStage>(local, request.identity, place, std::move(links),
                                       std::move(engine));
  }

 private:
  const InterBackendMaker make_;
};

}  // namespace

InterEngine inter_engine(InterBackendMaker make) {
  if (!make) return nullptr;
  return std::make_shared<C10dStageFactory>(std::move(make));
}

}  // namespace libddp
