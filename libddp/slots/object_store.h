#pragma once

// Objects under one address: names with '/', bytes that are written once as a whole, no renaming,
// no locks. Errors are SnapshotErrors with the address and the reason.
// Thread rule: const functions by any thread; one writer.
//
//   objects->write("step-8.2/index.json", text.size(), [&](auto& append) { append(bytes); });
//   objects->read("step-8.2/index.json", 0, 100);      // up to 100 bytes

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace libddp {

class ObjectStore {
 public:
  using Append = std::function<void(std::span<const std::byte>)>;

  virtual ~ObjectStore() = default;

  /// For messages, and ahead of names: without a '/' at its end.
  virtual std::string address() const = 0;
  /// Names of all objects; none where the address is not there.
  virtual std::vector<std::string> list() const = 0;
  /// From `offset` on, `bytes` of them or as many as there are.
  virtual std::string read(const std::string& name, std::uint64_t offset,
                           std::uint64_t bytes) const = 0;
  /// It is there when `produce` has returned, whole; if that throws, nothing of it is. `bytes`: at
  /// least about as many will come.
  virtual void write(const std::string& name, std::uint64_t bytes,
                     const std::function<void(const Append&)>& produce) = 0;
  /// Unless it is there; as far as the service can tell that, none of two at once replaces the
  /// other.
  virtual void create(const std::string& name, const std::string& text) = 0;
  /// What is not there is no error.
  virtual void remove(const std::vector<std::string>& names) = 0;
};

}  // namespace libddp
