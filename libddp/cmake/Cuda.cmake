# The room of CUDA tensors, where torch is a CUDA build. Only headers are needed, no compiler and no
# library: NCCL is found at run time, CUDA is reached through torch.
#
# LIBDDP_CUDA: AUTO = as torch is; ON = an error where it cannot be built; OFF.

set(LIBDDP_CUDA "AUTO" CACHE STRING "CUDA tensors over NCCL: AUTO (as torch is), ON or OFF")
set_property(CACHE LIBDDP_CUDA PROPERTY STRINGS AUTO ON OFF)

set(LIBDDP_WITH_CUDA OFF)
if(LIBDDP_CUDA STREQUAL "OFF")
    message(STATUS "libddp: without CUDA (LIBDDP_CUDA=OFF)")
elseif(NOT EXISTS "${LIBDDP_TORCH_DIR}/lib/libc10_cuda.so")
    if(NOT LIBDDP_CUDA STREQUAL "AUTO")
        message(
            FATAL_ERROR
            "libddp: LIBDDP_CUDA=${LIBDDP_CUDA}, but torch in ${LIBDDP_TORCH_DIR} is built without "
            "CUDA. Install a CUDA build of torch, or leave LIBDDP_CUDA at AUTO."
        )
    endif()
    message(STATUS "libddp: without CUDA, as this torch is")
else()
    set(LIBDDP_WITH_CUDA ON)
endif()

if(LIBDDP_WITH_CUDA)
    # The packages that torch's wheel brings, beside it; else a toolkit and the system.
    get_filename_component(torch_site "${LIBDDP_TORCH_DIR}" DIRECTORY)
    file(GLOB nvidia_includes "${torch_site}/nvidia/cu[0-9]*/include")
    list(APPEND nvidia_includes "${torch_site}/nvidia/cuda_runtime/include")
    find_path(
        LIBDDP_NCCL_INCLUDE_DIR
        nccl.h
        HINTS "${torch_site}/nvidia/nccl/include" ENV NCCL_HOME ENV NCCL_ROOT ENV CUDA_HOME
        PATHS /usr/local/cuda
        PATH_SUFFIXES include
    )
    find_path(
        LIBDDP_CUDA_INCLUDE_DIR
        cuda_runtime.h
        HINTS ${nvidia_includes} ENV CUDA_HOME ENV CUDA_PATH
        PATHS /usr/local/cuda
        PATH_SUFFIXES include
    )
    # Since CUDA 13 a part of them is in a package (nvidia-cuda-crt) that torch does not ask for. It
    # declares macros of the compiler, nothing that changes; triton, which torch brings, has it too.
    find_path(
        LIBDDP_CUDA_CRT_INCLUDE_DIR
        crt/host_defines.h
        HINTS "${LIBDDP_CUDA_INCLUDE_DIR}" ${nvidia_includes} ENV CUDA_HOME ENV CUDA_PATH
        PATHS /usr/local/cuda "${torch_site}/triton/backends/nvidia"
        PATH_SUFFIXES include
    )
    foreach(header IN ITEMS NCCL CUDA CUDA_CRT)
        if(NOT LIBDDP_${header}_INCLUDE_DIR)
            message(
                FATAL_ERROR
                "libddp: torch is a CUDA build, but the headers of ${header} were not found beside "
                "it (nvidia/nccl/include, nvidia/cu*/include) nor in a toolkit. Install the "
                "packages nvidia-nccl-* and nvidia-cuda-runtime-* that torch asks for and "
                "nvidia-cuda-crt, pass -DLIBDDP_${header}_INCLUDE_DIR=<folder>, or build without "
                "CUDA: -DLIBDDP_CUDA=OFF."
            )
        endif()
    endforeach()
    add_library(libddp_nccl_headers INTERFACE)
    target_include_directories(
        libddp_nccl_headers
        SYSTEM
        INTERFACE
            "${LIBDDP_NCCL_INCLUDE_DIR}" "${LIBDDP_CUDA_INCLUDE_DIR}" "${LIBDDP_CUDA_CRT_INCLUDE_DIR}"
    )
    message(STATUS "libddp: with CUDA; nccl.h in ${LIBDDP_NCCL_INCLUDE_DIR}")
endif()
