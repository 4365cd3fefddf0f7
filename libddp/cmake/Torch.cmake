# LibTorch from a torch package, without find_package(Torch): that one fails on the CUDA wheel where
# no CUDA toolkit is installed, and we use none of CUDA's headers.

if(NOT EXISTS "${LIBDDP_TORCH_DIR}/lib/libtorch_cpu.so")
    message(
        FATAL_ERROR
        "libddp: no torch found (LIBDDP_TORCH_DIR='${LIBDDP_TORCH_DIR}', "
        "Python_EXECUTABLE='${Python_EXECUTABLE}'). Install torch 2.11 to 2.15 for this Python, "
        "or pass -DLIBDDP_TORCH_DIR=<folder of the torch package>."
    )
endif()

file(STRINGS "${LIBDDP_TORCH_DIR}/version.py" version_line REGEX "^__version__")
string(REGEX MATCH "'([^']+)'" _ "${version_line}")
set(LIBDDP_TORCH_VERSION "${CMAKE_MATCH_1}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" LIBDDP_TORCH_MAJOR_MINOR "${LIBDDP_TORCH_VERSION}")
if(LIBDDP_TORCH_MAJOR_MINOR VERSION_LESS 2.11)
    message(FATAL_ERROR "libddp needs torch 2.11 or newer, found ${LIBDDP_TORCH_VERSION}.")
endif()
message(STATUS "libddp: torch ${LIBDDP_TORCH_VERSION} in ${LIBDDP_TORCH_DIR}")

add_library(libddp_torch INTERFACE)
target_include_directories(
    libddp_torch
    SYSTEM
    INTERFACE
        "${LIBDDP_TORCH_DIR}/include"
        "${LIBDDP_TORCH_DIR}/include/torch/csrc/api/include"
)
target_link_libraries(
    libddp_torch
    INTERFACE
        "${LIBDDP_TORCH_DIR}/lib/libtorch.so"
        "${LIBDDP_TORCH_DIR}/lib/libtorch_cpu.so"
        "${LIBDDP_TORCH_DIR}/lib/libc10.so"
)
# USE_DISTRIBUTED opens the c10d headers; the flag that the wheels were built with.
target_compile_definitions(libddp_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
# The CUDA wheel's libtorch.so names CUDA libraries that Python preloads; a linker must not follow.
target_link_options(libddp_torch INTERFACE "LINKER:--allow-shlib-undefined")

# Only for the extension module.
add_library(libddp_torch_python INTERFACE)
target_link_libraries(
    libddp_torch_python
    INTERFACE libddp_torch "${LIBDDP_TORCH_DIR}/lib/libtorch_python.so"
)
