#pragma once

// Objects that another program brings to their address: the keeper knows memories and folders, and
// what speaks with storage services is written in Python (python/libddp/_upload.py). The program
// has one end of a socket as its standard input, answers each frame with one, and ends with it.
// Thread rule: as ObjectStore, one call at a time; abandon() from any thread.
//
//   HelperObjects objects({.program = {"python", "-m", "libddp._upload"}}, "s3://bucket/run");
//   objects.list();

#include <sys/types.h>

#include <atomic>
#include <string>
#include <vector>

#include "libddp/base/unique_fd.h"
#include "libddp/slots/object_store.h"

namespace libddp {

/// How it is started.
struct StorageHelper {
  /// With its arguments; empty: there is none.
  std::vector<std::string> program = {};
  /// NAME=value: what the job's process has, since credentials may stand there.
  std::vector<std::string> environment = {};

  bool operator==(const StorageHelper&) const = default;
};

class HelperObjects final : public ObjectStore {
 public:
  /// Throws SnapshotError if it cannot be started, or cannot serve that address.
  HelperObjects(const StorageHelper& helper, std::string address);
  /// What it is writing is not finished.
  ~HelperObjects() override;
  HelperObjects(const HelperObjects&) = delete;
  HelperObjects& operator=(const HelperObjects&) = delete;

  std::string address() const override { return address_; }
  std::vector<std::string> list() const override;
  std::string read(const std::string& name, std::uint64_t offset,
                   std::uint64_t bytes) const override;
  void write(const std::string& name, std::uint64_t bytes,
             const std::function<void(const Append&)>& produce) override;
  void create(const std::string& name, const std::string& text) override;
  void remove(const std::vector<std::string>& names) override;

  /// It has ended, or has not answered: no call will succeed any more.
  bool is_lost() const { return is_lost_; }
  /// The call that waits, and all later ones, fail at once.
  void abandon();

 private:
  void start(const StorageHelper& helper);
  /// Waits for its end, so that nothing is left of it.
  void end();
  /// Sends a request, and `payload` behind it if there is one; returns the answer's bytes.
  std::string call(const std::string& request, const std::string* payload = nullptr) const;

  const std::string address_;
  UniqueFd socket_;
  pid_t pid_ = 0;
  mutable std::atomic<bool> is_lost_{false};
};

}  // namespace libddp
