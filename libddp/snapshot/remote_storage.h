#pragma once

// What storing at an address takes in place of a folder. Thread rule: value.
//
//   options.folder = "s3://bucket/run";
//   options.remote = std::make_shared<RemoteStorage>(RemoteStorage{objects, helper});

#include <memory>

#include "libddp/keeper/helper_objects.h"
#include "libddp/slots/object_store.h"

namespace libddp {

struct RemoteStorage {
  /// What this process loads from.
  std::shared_ptr<ObjectStore> objects;
  /// What the keeper starts to store there.
  StorageHelper helper;
};

}  // namespace libddp
