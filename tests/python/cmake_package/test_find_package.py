"""find_package(libddp) of the installed package: more than once, optional, and on which torch.

The torches are folders with the files that CMake looks at; nothing is compiled.
"""

import shutil
from pathlib import Path

import pytest
import torch

import libddp

INSTALLED = Path(libddp.__file__).parent
VERSION = torch.__version__
REQUIRED = "find_package(libddp CONFIG REQUIRED)"


@pytest.fixture
def prefix(tmp_path):
    """An installed libddp that has no torch beside it."""
    if not (INSTALLED / "share/cmake/libddp/libddp-config.cmake").exists():
        pytest.skip(f"{INSTALLED} is no installed libddp (pip install .): it has no CMake package")
    folder = tmp_path / "site" / "libddp"
    shutil.copytree(INSTALLED / "share/cmake", folder / "share/cmake")
    for name in ("include", "lib"):
        (folder / name).symlink_to(INSTALLED / name)
    return folder


def make_torch(folder: Path, version: str = VERSION, wheel: bool = True) -> Path:
    """A torch package; not `wheel`: LibTorch alone, without a file of Python's."""
    config = folder / "share/cmake/Torch"
    config.mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include/torch/csrc/api/include").mkdir(parents=True)
    (folder / "lib/libtorch_cpu.so").touch()
    (config / "TorchConfig.cmake").write_text(f'set(TORCH_INSTALL_PREFIX "{folder}")\n')
    (config / "TorchConfigVersion.cmake").write_text(
        f'set(PACKAGE_VERSION "{version.split("+")[0]}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    )
    if wheel:
        (folder / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return folder


def found(folder: Path, version: str = VERSION) -> str:
    return f"libddp: torch {version} in {folder} "


def test_several_directories_of_a_project_may_ask_for_it(configure, prefix, tmp_path):
    package = make_torch(tmp_path / "torch")
    for name in ("one", "other"):
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "CMakeLists.txt").write_text(
            f"{REQUIRED}\n{REQUIRED}\nadd_executable({name} ../main.cpp)\n"
            f"target_link_libraries({name} PRIVATE libddp::libddp)\n"
        )
    worked, text = configure(
        "add_subdirectory(one)\nadd_subdirectory(other)",
        CMAKE_PREFIX_PATH=prefix,
        LIBDDP_TORCH_DIR=package,
    )
    assert worked, text
    assert text.count(found(package)) == 1


def test_a_project_may_do_without(configure, prefix, tmp_path):
    package = make_torch(tmp_path / "torch")
    worked, text = configure(
        "find_package(libddp CONFIG QUIET)\n"
        'message(STATUS "${libddp_FOUND}: ${libddp_NOT_FOUND_MESSAGE}")\n'
        f"set(LIBDDP_TORCH_DIR {package})\n"
        f"{REQUIRED}\n"
        'message(STATUS "then ${libddp_FOUND}")',
        CMAKE_PREFIX_PATH=prefix,
    )
    assert worked, text
    assert "0: no torch found" in text
    assert "then 1" in text


def test_where_it_is_required_the_error_says_what_is_missing(configure, prefix):
    worked, text = configure(REQUIRED, CMAKE_PREFIX_PATH=prefix)
    assert not worked
    minor = ".".join(VERSION.split(".")[:2])
    assert (
        f"no torch found, neither in CMAKE_PREFIX_PATH nor among the packages of Python. Install "
        f"torch {minor} for this Python, or pass -DLIBDDP_TORCH_DIR=<folder of the torch package>."
    ) in text


def test_no_component_is_taken_for_there(configure, prefix, tmp_path):
    package = make_torch(tmp_path / "torch")
    places = {"CMAKE_PREFIX_PATH": prefix, "LIBDDP_TORCH_DIR": package}
    worked, text = configure(f"{REQUIRED[:-1]} COMPONENTS nccl)", **places)
    assert not worked
    assert "libddp has no components, and so no 'nccl'." in text
    worked, text = configure(
        f"{REQUIRED[:-1]} OPTIONAL_COMPONENTS nccl)\nmessage(STATUS \"'${{libddp_nccl_FOUND}}'\")",
        **places,
    )
    assert worked, text
    assert "-- ''" in text


def test_what_somebody_has_said_comes_before_what_is_there(
    configure, prefix, python_with_torch, tmp_path
):
    """Each place in turn, while all the places after it have a torch too."""
    names = ("named", "project", "prefix", "root", "python")
    named, project, in_prefix, root, of_python = (make_torch(tmp_path / name) for name in names)
    beside = make_torch(prefix.parent / "torch")
    python = python_with_torch(of_python)
    prefixes = {"CMAKE_PREFIX_PATH": f"{prefix};{in_prefix}"}
    with_project = f"find_package(Torch REQUIRED PATHS {project} NO_DEFAULT_PATH)\n{REQUIRED}"

    worked, text = configure(with_project, python, **prefixes, LIBDDP_TORCH_DIR=named)
    assert worked, text
    assert found(named) in text
    worked, text = configure(with_project, python, **prefixes)
    assert worked, text
    assert found(project) in text
    worked, text = configure(REQUIRED, python, **prefixes, Torch_ROOT=root)
    assert worked, text
    assert found(root) in text
    worked, text = configure(REQUIRED, python, **prefixes)
    assert worked, text
    assert found(in_prefix) in text
    worked, text = configure(REQUIRED, python, CMAKE_PREFIX_PATH=prefix)
    assert worked, text
    assert found(beside) in text
    shutil.rmtree(beside)
    worked, text = configure(REQUIRED, python, CMAKE_PREFIX_PATH=prefix)
    assert worked, text
    assert found(of_python) in text


def test_the_prefix_that_torch_names_is_one_too(configure, prefix, tmp_path):
    """torch.utils.cmake_prefix_path, of LibTorch without Python."""
    package = make_torch(tmp_path / "libtorch", wheel=False)
    worked, text = configure(REQUIRED, CMAKE_PREFIX_PATH=f"{prefix};{package}/share/cmake")
    assert worked, text
    assert found(package, VERSION.split("+")[0]) in text


def test_a_torch_that_it_was_not_built_for_is_refused(configure, prefix, tmp_path):
    make_torch(prefix.parent / "torch")
    other = make_torch(tmp_path / "other", "2.999.1")
    for place in ({"LIBDDP_TORCH_DIR": other}, {"Torch_ROOT": other}):
        worked, text = configure(REQUIRED, CMAKE_PREFIX_PATH=prefix, **place)
        assert not worked
        assert f"but {other} holds torch 2.999.1. Reinstall libddp" in text


def test_a_named_folder_without_torch_is_not_passed_over(configure, prefix, tmp_path):
    make_torch(prefix.parent / "torch")
    empty = tmp_path / "empty"
    worked, text = configure(REQUIRED, CMAKE_PREFIX_PATH=prefix, LIBDDP_TORCH_DIR=empty)
    assert not worked
    assert f"no torch found in {empty}, which LIBDDP_TORCH_DIR names" in text


def test_a_project_has_one_torch(configure, prefix, tmp_path):
    first, second = make_torch(tmp_path / "first"), make_torch(tmp_path / "second")
    worked, text = configure(
        f"set(LIBDDP_TORCH_DIR {first})\n{REQUIRED}\nset(LIBDDP_TORCH_DIR {second})\n{REQUIRED}",
        CMAKE_PREFIX_PATH=prefix,
    )
    assert not worked
    assert f"libddp is on that in {first} already: not on that in {second}" in text
