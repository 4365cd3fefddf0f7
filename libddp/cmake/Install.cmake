# What a wheel and `cmake --install` carry, with relative paths only:
#   lib/libddp.so   include/libddp/...   share/cmake/libddp/   and, for Python, _C.*.so
# In a wheel the prefix is site-packages/libddp, so torch stands in ../torch.

include(CMakePackageConfigHelpers)

set_target_properties(libddp PROPERTIES INSTALL_RPATH "$ORIGIN/../../torch/lib" OUTPUT_NAME ddp)
install(TARGETS libddp LIBRARY DESTINATION lib COMPONENT library)
install(
    DIRECTORY "${CMAKE_SOURCE_DIR}/libddp/"
    DESTINATION include/libddp
    FILES_MATCHING
    PATTERN "*.h"
    PATTERN "cmake" EXCLUDE
)
if(TARGET _C)
    set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")
    install(TARGETS _C LIBRARY DESTINATION .)
endif()

set(config_dir share/cmake/libddp)
configure_package_config_file(
    "${CMAKE_SOURCE_DIR}/libddp/cmake/libddp-config.cmake.in"
    "${CMAKE_BINARY_DIR}/libddp-config.cmake"
    INSTALL_DESTINATION ${config_dir}
)
write_basic_package_version_file(
    "${CMAKE_BINARY_DIR}/libddp-config-version.cmake"
    COMPATIBILITY SameMinorVersion
)
install(
    FILES
        "${CMAKE_BINARY_DIR}/libddp-config.cmake"
        "${CMAKE_BINARY_DIR}/libddp-config-version.cmake"
        "${CMAKE_SOURCE_DIR}/libddp/cmake/Torch.cmake"
    DESTINATION ${config_dir}
)
