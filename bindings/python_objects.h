#pragma once

// Objects behind an address that Python reaches (python/libddp/_objects.py).
// Thread rule: as ObjectStore; it takes the GIL for each call, so callers do not wait with it for
// threads that call.
//
//   ObjectFolder folder(std::make_shared<PythonObjects>(objects));

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "libddp/slots/object_store.h"

namespace libddp {

class PythonObjects final : public ObjectStore {
 public:
  /// REQUIRES the GIL.
  explicit PythonObjects(pybind11::object objects);
  ~PythonObjects() override;
  PythonObjects(const PythonObjects&) = delete;
  PythonObjects& operator=(const PythonObjects&) = delete;

  std::string address() const override { return address_; }
  std::vector<std::string> list() const override;
  std::string read(const std::string& name, std::uint64_t offset,
                   std::uint64_t bytes) const override;
  void write(const std::string& name, std::uint64_t bytes,
             const std::function<void(const Append&)>& produce) override;
  void create(const std::string& name, const std::string& text) override;
  void remove(const std::vector<std::string>& names) override;

 private:
  pybind11::object objects_;
  const std::string address_;
};

}  // namespace libddp
