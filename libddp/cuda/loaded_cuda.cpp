#include "libddp/cuda/loaded_cuda.h"

#include <dlfcn.h>

#include <initializer_list>

namespace libddp {
namespace {

void* find_in(std::initializer_list<const char*> libraries, const char* name) {
  for (const char* const library : libraries) {
    void* const handle = ::dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (handle != nullptr) return ::dlsym(handle, name);
  }
  return nullptr;
}

}  // namespace

void* find_in_runtime(const char* name) {
  return find_in({"libcudart.so.13", "libcudart.so.12"}, name);
}

void* find_in_driver(const char* name) { return find_in({"libcuda.so.1"}, name); }

}  // namespace libddp
