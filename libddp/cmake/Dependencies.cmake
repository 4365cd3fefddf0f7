# Third-party packages other than torch. fmt stays private to the library.

find_package(Threads REQUIRED)
find_package(Python 3.10 COMPONENTS Interpreter REQUIRED)

include(Torch)
libddp_find_torch("" "")
if(LIBDDP_TORCH_PROBLEM AND NOT LIBDDP_CORE_ONLY)
    message(FATAL_ERROR "libddp: ${LIBDDP_TORCH_PROBLEM}")
endif()

# fmt: torch's bundled headers, copied so that the core cannot include torch by accident, and compiled
# once for each build: each file that formats would else compile all of it. Else the system's.
if(EXISTS "${LIBDDP_TORCH_DIR}/include/fmt/format.h")
    file(
        COPY "${LIBDDP_TORCH_DIR}/include/fmt"
        DESTINATION "${PROJECT_BINARY_DIR}/third_party"
    )
    set(fmt_functions "${PROJECT_BINARY_DIR}/third_party/fmt_functions.cpp")
    configure_file("${CMAKE_CURRENT_LIST_DIR}/fmt_functions.cpp.in" "${fmt_functions}" COPYONLY)
    add_library(libddp_fmt STATIC "${fmt_functions}")
    target_include_directories(libddp_fmt SYSTEM PUBLIC "${PROJECT_BINARY_DIR}/third_party")
    # Not seen outside of the library that has it: torch may have functions of the same names.
    set_target_properties(libddp_fmt PROPERTIES CXX_VISIBILITY_PRESET hidden)
    libddp_compile_options(libddp_fmt)
else()
    find_package(fmt REQUIRED)
    add_library(libddp_fmt INTERFACE)
    target_link_libraries(libddp_fmt INTERFACE fmt::fmt)
endif()

# nlohmann_json: the folder that LIBDDP_JSON_DIR names (also as a variable of the environment), else
# the Python package that pyproject.toml names for the build, else the system's.
add_library(libddp_json INTERFACE)
if(NOT LIBDDP_JSON_DIR)
    set(LIBDDP_JSON_DIR "$ENV{LIBDDP_JSON_DIR}")
endif()
if(NOT LIBDDP_JSON_DIR)
    libddp_python_package(nlohmann_json json_package)
    if(EXISTS "${json_package}/include/nlohmann/json.hpp")
        set(LIBDDP_JSON_DIR "${json_package}/include")
    endif()
endif()
if(LIBDDP_JSON_DIR)
    target_include_directories(libddp_json SYSTEM INTERFACE "${LIBDDP_JSON_DIR}")
else()
    find_package(nlohmann_json 3.10 QUIET)
    if(NOT nlohmann_json_FOUND)
        message(
            FATAL_ERROR
            "libddp needs the headers of nlohmann_json: pip install nlohmann-json, or the Debian "
            "package nlohmann-json3-dev, or LIBDDP_JSON_DIR=<folder that has nlohmann/json.hpp>"
        )
    endif()
    target_link_libraries(libddp_json INTERFACE nlohmann_json::nlohmann_json)
endif()
