#include "libddp/fsdp/no_sync.h"

#include "libddp/fsdp/sharded_model.h"

namespace libddp {

NoSync::NoSync(ShardedModel& model) : model_(&model), before_(model.syncs()) {
  model.set_sync(false);
}

NoSync::~NoSync() {
  if (model_ != nullptr) model_->set_sync(before_);
}

}  // namespace libddp
