#include "bindings/run_key.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "libddp/bootstrap/run_key.h"

namespace py = pybind11;

namespace libddp {
namespace {

py::object tag(const std::vector<std::string>& parts) {
  std::shared_ptr<const RunKey> key;
  {
    const py::gil_scoped_release released;
    key = given_run_key();
  }
  if (!key) return py::none();
  std::string message;
  for (const std::string& part : parts) {
    const std::uint64_t size = part.size();
    message.append(reinterpret_cast<const char*>(&size), sizeof(size));
    message.append(part);
  }
  const Digest digest = key->tag({"libddp python", message});
  return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

}  // namespace

void bind_run_key(py::module_& module) {
  module.def("run_key_tag", &tag, py::arg("parts"),
             "HMAC-SHA256 of the run key that the environment names over the parts and their "
             "lengths; None if it names none.");
}

}  // namespace libddp
