# Compiler flags of every target of ours.

function(libddp_compile_options target)
    target_compile_options(${target} PRIVATE -Wall -Wextra -fvisibility-inlines-hidden)
    # Relative paths in messages and debug information: the same object from any checkout.
    target_compile_options(${target} PRIVATE "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
    # A compiler that links its standard library in (libstdc++.a, where there is no libstdc++.so) puts
    # a copy into each library. Unseen by the others: they would take parts of one and of another.
    target_link_options(
        ${target}
        PRIVATE "LINKER:--exclude-libs,libstdc++.a:libsupc++.a:libgcc.a:libgcc_eh.a"
    )
    # Calls within the library are direct, and inlined where that pays: nobody puts another function in
    # the place of one of ours. Through the table of procedures each costs a jump, and the lines of the
    # cache that hold it, several hundred times in a training step.
    target_compile_options(${target} PRIVATE -fno-semantic-interposition)
    target_link_options(${target} PRIVATE "LINKER:-Bsymbolic-functions")
    if(LIBDDP_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
    if(LIBDDP_SANITIZE)
        # -O1, after the build type's own level, and of debug information only lines: the reports stay
        # exact and the build is more than twice as fast.
        set(flags "-fsanitize=${LIBDDP_SANITIZE}" -fno-omit-frame-pointer -g1 -O1)
        if(LIBDDP_SANITIZE MATCHES "undefined")
            list(APPEND flags -fno-sanitize-recover=all)
        endif()
        if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
            # Instrumented standard headers (<regex>) raise it falsely.
            list(APPEND flags -Wno-maybe-uninitialized)
            if(LIBDDP_SANITIZE MATCHES "thread" AND NOT LIBDDP_CORE_ONLY)
                # Fences, which it does not follow: torch's headers have some, the core has none.
                list(APPEND flags -Wno-tsan)
            endif()
        endif()
        target_compile_options(${target} PUBLIC ${flags})
        target_link_options(${target} PUBLIC ${flags})
    endif()
endfunction()

# What most files on torch include, read once for each target: torch's headers are most of what its
# compiler reads. A file still includes what it uses.
function(libddp_precompile target)
    if(LIBDDP_PRECOMPILE)
        target_precompile_headers(
            ${target}
            PRIVATE
                <ATen/TensorOperators.h>
                <ATen/core/Tensor.h>
                <c10/core/GradMode.h>
                <torch/csrc/autograd/function.h>
                <torch/csrc/autograd/variable.h>
                <torch/csrc/distributed/c10d/Backend.hpp>
                <torch/csrc/distributed/c10d/Store.hpp>
                ${ARGN}
        )
    endif()
endfunction()

# With CMAKE_UNITY_BUILD: which sources of a room are compiled as one, at most ten. Never those of two
# rooms, and the same in each target that has them: names in anonymous namespaces, which must differ
# within a room, clash in all builds or in none. For targets whose UNITY_BUILD_MODE is GROUP.
function(libddp_unity_groups room)
    list(LENGTH ARGN count)
    math(EXPR last "(${count} + 9) / 10")
    set(index 0)
    foreach(source IN LISTS ARGN)
        math(EXPR group "${index} * ${last} / ${count}")
        set_source_files_properties(${source} PROPERTIES UNITY_GROUP "${room}_${group}")
        math(EXPR index "${index} + 1")
    endforeach()
endfunction()

# Kernels of one instruction set stand in a file named after it and are chosen at run time.
function(libddp_kernel_options)
    if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        return()
    endif()
    set(avx2 "-mavx2;-mfma;-mf16c")
    set(avx512 "${avx2};-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq")
    set(sse42 "-msse4.2;-mpclmul")
    file(GLOB avx2_sources CONFIGURE_DEPENDS libddp/kernels/*_avx2.cpp)
    file(GLOB avx512_sources CONFIGURE_DEPENDS libddp/kernels/*_avx512.cpp)
    file(GLOB sse42_sources CONFIGURE_DEPENDS libddp/kernels/*_sse42.cpp)
    file(GLOB vpclmul_sources CONFIGURE_DEPENDS libddp/kernels/*_vpclmul.cpp)
    # No contraction: a multiply and an add stay two roundings on every path.
    set_source_files_properties(${avx2_sources} PROPERTIES COMPILE_OPTIONS "${avx2};-ffp-contract=off")
    set_source_files_properties(
        ${avx512_sources}
        PROPERTIES COMPILE_OPTIONS "${avx512};-ffp-contract=off"
    )
    set_source_files_properties(${sse42_sources} PROPERTIES COMPILE_OPTIONS "${sse42}")
    set_source_files_properties(
        ${vpclmul_sources}
        PROPERTIES COMPILE_OPTIONS "${avx512};${sse42};-mvpclmulqdq"
    )
endfunction()

# Puts libddp_core's objects inside the shared library, so that users link one file.
function(libddp_embed_core target)
    target_link_libraries(
        ${target}
        PRIVATE
            "$<BUILD_INTERFACE:-Wl,--whole-archive>"
            "$<BUILD_INTERFACE:libddp_core>"
            "$<BUILD_INTERFACE:-Wl,--no-whole-archive>"
    )
endfunction()

# Lets a source include torch's ProcessGroupGloo.hpp, which includes headers that no wheel carries.
function(libddp_gloo_names source)
    set(folder "${PROJECT_BINARY_DIR}/gloo_names")
    foreach(header algorithm common/error context rendezvous/store transport/device)
        configure_file(
            "${PROJECT_SOURCE_DIR}/libddp/cmake/gloo_names.h.in"
            "${folder}/gloo/${header}.h"
            COPYONLY
        )
    endforeach()
    set_source_files_properties("${source}" PROPERTIES INCLUDE_DIRECTORIES "${folder}")
endfunction()
