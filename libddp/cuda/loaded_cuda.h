#pragma once

// Functions of the CUDA libraries that torch has loaded, for the little that c10 has no name for.
// Nothing is linked, and nothing is loaded for them: without CUDA there are none.
// Thread rule: any thread.
//
//   auto* const query =
//   runtime_function<decltype(::cudaStreamIsCapturing)>("cudaStreamIsCapturing"); if (query !=
//   nullptr) query(stream, &status);

namespace libddp {

/// Of the runtime (libcudart); null where it is not loaded or has none of that name.
void* find_in_runtime(const char* name);
/// Of the driver (libcuda).
void* find_in_driver(const char* name);

template <typename Function>
Function* runtime_function(const char* name) {
  return reinterpret_cast<Function*>(find_in_runtime(name));
}

template <typename Function>
Function* driver_function(const char* name) {
  return reinterpret_cast<Function*>(find_in_driver(name));
}

}  // namespace libddp
