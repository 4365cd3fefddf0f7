# LibTorch from a torch package, without find_package(Torch): that one fails on the CUDA wheel where
# no CUDA toolkit is installed, and we use none of CUDA's headers.
#
# For the build and, installed, for find_package(libddp). Nothing here ends the configuration, since
# a project may be able to do without libddp.

# Folder of an installed Python package, found without importing it.
function(libddp_python_package name result)
    execute_process(
        COMMAND
            "${Python_EXECUTABLE}" -c
            "import importlib.util, os; s = importlib.util.find_spec('${name}'); print(os.path.dirname(s.origin) if s and s.origin else (list(s.submodule_search_locations)[0] if s else ''))"
        OUTPUT_VARIABLE folder
        OUTPUT_STRIP_TRAILING_WHITESPACE
        ERROR_QUIET
    )
    set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# The torch of the first prefix that has one, looked for as find_package(Torch) would; empty: none.
function(libddp_torch_in_prefixes result)
    string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
    list(
        PREPEND
        prefixes
        ${Torch_ROOT}
        $ENV{Torch_ROOT}
        ${CMAKE_PREFIX_PATH}
        $ENV{Torch_DIR}
    )
    set(${result} "" PARENT_SCOPE)
    foreach(prefix IN LISTS prefixes)
        # The folder of torch, that of torch.utils.cmake_prefix_path, site-packages, Torch_DIR.
        foreach(suffix IN ITEMS /share/cmake/Torch /Torch /torch/share/cmake/Torch "")
            get_filename_component(folder "${prefix}${suffix}/../../.." ABSOLUTE)
            if(
                EXISTS "${prefix}${suffix}/TorchConfig.cmake"
                AND EXISTS "${folder}/lib/libtorch_cpu.so"
            )
                set(${result} "${folder}" PARENT_SCOPE)
                return()
            endif()
        endforeach()
    endforeach()
endfunction()

# The torch of the Python that was found, else of the one that a shell would start; empty: none.
function(libddp_torch_of_python result)
    if(NOT Python_EXECUTABLE)
        # Not find_package(Python), whose answer would stay for the project that uses libddp.
        set(Python_EXECUTABLE "${Python3_EXECUTABLE}")
    endif()
    if(NOT Python_EXECUTABLE)
        find_program(
            libddp_python
            NAMES python3 python
            HINTS "$ENV{VIRTUAL_ENV}/bin" "$ENV{CONDA_PREFIX}/bin"
            NO_CACHE
        )
        set(Python_EXECUTABLE "${libddp_python}")
    endif()
    set(folder "")
    if(Python_EXECUTABLE)
        libddp_python_package(torch folder)
    endif()
    if(NOT EXISTS "${folder}/lib/libtorch_cpu.so")
        set(folder "")
    endif()
    set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# What somebody has said comes before what happens to be there. `beside` is the folder next to an
# installed libddp, the torch that a wheel was built for. `named`: what names the folder, where
# somebody has, so that no other one may stand in for it.
function(libddp_torch_folder beside result named)
    set(${named} "" PARENT_SCOPE)
    if(LIBDDP_TORCH_DIR)
        get_filename_component(folder "${LIBDDP_TORCH_DIR}" ABSOLUTE)
        set(${named} "LIBDDP_TORCH_DIR" PARENT_SCOPE)
    elseif(TARGET libddp_torch)
        get_target_property(folder libddp_torch LIBDDP_TORCH_DIR)
    elseif(TORCH_INSTALL_PREFIX)
        set(folder "${TORCH_INSTALL_PREFIX}")
        set(${named} "this project's find_package(Torch)" PARENT_SCOPE)
    elseif(Torch_DIR)
        # All that is seen of a find_package(Torch) elsewhere in the project, or of one that failed.
        get_filename_component(folder "${Torch_DIR}/../../.." ABSOLUTE)
        set(${named} "Torch_DIR" PARENT_SCOPE)
    else()
        libddp_torch_in_prefixes(folder)
        if(NOT folder AND EXISTS "${beside}/lib/libtorch_cpu.so")
            set(folder "${beside}")
        endif()
        if(NOT folder)
            libddp_torch_of_python(folder)
        endif()
    endif()
    set(${result} "${folder}" PARENT_SCOPE)
endfunction()

# Empty where neither file tells: a wheel has the first, LibTorch without Python the second.
function(libddp_torch_version folder result)
    set(${result} "" PARENT_SCOPE)
    foreach(file IN ITEMS version.py share/cmake/Torch/TorchConfigVersion.cmake)
        if(EXISTS "${folder}/${file}")
            file(STRINGS "${folder}/${file}" lines REGEX "^__version__|^set\\(PACKAGE_VERSION ")
            if(lines MATCHES "['\"]([0-9][^'\"]*)['\"]")
                set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
                return()
            endif()
        endif()
    endforeach()
endfunction()

# What is wrong with the torch in `folder`; empty: nothing. `built_for`: the minor version that
# libddp.so is for; empty where it is yet to be built.
function(libddp_torch_problem folder named version built_for result)
    set(problem "")
    set(wanted "${built_for}")
    if(NOT wanted)
        set(wanted "2.11 to 2.15")
    endif()
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" major_minor "${version}")
    set(pass_folder "-DLIBDDP_TORCH_DIR=<folder of the torch package>")
    if(NOT folder)
        string(
            CONCAT
            problem
            "no torch found, neither in CMAKE_PREFIX_PATH nor among the packages of Python. "
            "Install torch ${wanted} for this Python, or pass ${pass_folder}."
        )
    elseif(NOT EXISTS "${folder}/lib/libtorch_cpu.so")
        string(
            CONCAT
            problem
            "no torch found in ${folder}, which ${named} names: it has no lib/libtorch_cpu.so. "
            "Pass ${pass_folder}, which has torch ${wanted}."
        )
    elseif(NOT version)
        set(problem "torch in ${folder} does not say its version. Pass ${pass_folder}.")
    elseif(built_for AND NOT major_minor VERSION_EQUAL built_for)
        string(
            CONCAT
            problem
            "libddp was built against torch ${built_for}, but ${folder} holds torch ${version}. "
            "Reinstall libddp in that environment (pip install .), or pass ${pass_folder}."
        )
    elseif(major_minor VERSION_LESS 2.11)
        set(problem "libddp needs torch 2.11 or newer, found ${version} in ${folder}.")
    elseif(TARGET libddp_torch)
        get_target_property(other libddp_torch LIBDDP_TORCH_DIR)
        file(REAL_PATH "${folder}" real_folder)
        file(REAL_PATH "${other}" real_other)
        if(NOT real_folder STREQUAL real_other)
            string(
                CONCAT
                problem
                "a project has one torch, and libddp is on that in ${other} already: not on that "
                "in ${folder}, which ${named} names."
            )
        endif()
    endif()
    set(${result} "${problem}" PARENT_SCOPE)
endfunction()

# ENSURES: LIBDDP_TORCH_DIR, LIBDDP_TORCH_VERSION and LIBDDP_TORCH_MAJOR_MINOR are those of a torch
# that can be used and LIBDDP_TORCH_PROBLEM is empty; or it says what is wrong and the others stay
# as they were, so that a later call looks again.
function(libddp_find_torch beside built_for)
    libddp_torch_folder("${beside}" folder named)
    libddp_torch_version("${folder}" version)
    libddp_torch_problem("${folder}" "${named}" "${version}" "${built_for}" problem)
    set(LIBDDP_TORCH_PROBLEM "${problem}" PARENT_SCOPE)
    if(NOT problem)
        string(REGEX MATCH "^[0-9]+\\.[0-9]+" major_minor "${version}")
        set(LIBDDP_TORCH_DIR "${folder}" PARENT_SCOPE)
        set(LIBDDP_TORCH_VERSION "${version}" PARENT_SCOPE)
        set(LIBDDP_TORCH_MAJOR_MINOR "${major_minor}" PARENT_SCOPE)
    endif()
endfunction()

# The targets of the torch that was found, once in a project: they are seen in all its directories.
function(libddp_add_torch)
    if(TARGET libddp_torch)
        return()
    endif()
    if(NOT libddp_FIND_QUIETLY)
        message(STATUS "libddp: torch ${LIBDDP_TORCH_VERSION} in ${LIBDDP_TORCH_DIR}")
    endif()
    add_library(libddp_torch INTERFACE)
    set_target_properties(libddp_torch PROPERTIES LIBDDP_TORCH_DIR "${LIBDDP_TORCH_DIR}")
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
    # The CUDA wheel's libtorch.so names CUDA libraries that Python preloads; a linker must not
    # follow.
    target_link_options(libddp_torch INTERFACE "LINKER:--allow-shlib-undefined")

    # Only for the extension module.
    add_library(libddp_torch_python INTERFACE)
    target_link_libraries(
        libddp_torch_python
        INTERFACE libddp_torch "${LIBDDP_TORCH_DIR}/lib/libtorch_python.so"
    )
endfunction()
