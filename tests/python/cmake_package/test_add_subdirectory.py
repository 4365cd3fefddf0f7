"""add_subdirectory(libddp): the sources as a part of another project, only configured."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
PROJECT = f"""
list(APPEND CMAKE_MODULE_PATH "${{CMAKE_CURRENT_SOURCE_DIR}}/modules")
add_subdirectory({ROOT} libddp)
add_executable(app main.cpp)
target_link_libraries(app PRIVATE libddp::libddp)
get_target_property(library libddp::libddp ALIASED_TARGET)
get_target_property(file ${{library}} OUTPUT_NAME)
message(STATUS "library ${{file}}, own build type '${{CMAKE_BUILD_TYPE}}'")
"""


@pytest.fixture
def add(configure, tmp_path):
    if importlib.util.find_spec("nlohmann_json") is None:
        pytest.skip("there are no headers of nlohmann_json (pip install nlohmann-json)")
    # Modules of the other project's that have the names of ours.
    modules = tmp_path / "project" / "modules"
    modules.mkdir(parents=True)
    for source in (ROOT / "libddp/cmake").glob("*.cmake"):
        (modules / source.name).write_text('message(FATAL_ERROR "the other project\'s")\n')

    def add(**variables):
        variables = {"LIBDDP_TORCH_DIR": Path(torch.__file__).parent, **variables}
        worked, text = configure(PROJECT, sys.executable, LIBDDP_CUDA="OFF", **variables)
        assert worked, text
        return text, tmp_path / "build"

    return add


def test_it_is_the_library_alone(add):
    text, build = add()
    assert "library ddp, own build type ''" in text
    assert not (build / "libddp" / "tests").exists()
    assert not (build / "libddp" / "bindings").exists()
    assert "libddp.so" not in (build / "libddp/cmake_install.cmake").read_text()
    # All that it writes stands in its own folder.
    ours = {"third_party", "gloo_names", "libddp-config.cmake"}
    assert not ours & {path.name for path in build.iterdir()}


def test_it_may_be_installed_with_the_other_project(add):
    _, build = add(LIBDDP_INSTALL="ON")
    script = (build / "libddp/cmake_install.cmake").read_text()
    assert "libddp.so" in script
    assert f"{ROOT}/libddp/libddp.h" in script
    assert f"{build}/libddp/libddp-config.cmake" in script
