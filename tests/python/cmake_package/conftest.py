"""Projects that use libddp by CMake, configured and never built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What in the environment would find torch, or the whole package, by itself.
FINDERS = ("CMAKE_PREFIX_PATH", "Torch_DIR", "Torch_ROOT", "libddp_DIR", "libddp_ROOT")
NO_PYTHON = "/bin/true"  # prints no folder, as a Python without torch


@pytest.fixture
def configure(tmp_path):
    """Configures a project of such commands; returns whether it works, and what CMake printed."""

    def configure(commands: str, python: str | Path = NO_PYTHON, **variables) -> tuple[bool, str]:
        project = tmp_path / "project"
        project.mkdir(exist_ok=True)
        (project / "main.cpp").write_text("int main() {}\n")
        (project / "CMakeLists.txt").write_text(
            f"cmake_minimum_required(VERSION 3.22)\nproject(user LANGUAGES CXX)\n{commands}\n"
        )
        # Nothing found before, but for the compiler.
        (tmp_path / "build" / "CMakeCache.txt").unlink(missing_ok=True)
        given = {"Python_EXECUTABLE": python, **variables}
        done = subprocess.run(
            ["cmake", "-S", project, "-B", tmp_path / "build", "-G", "Ninja"]
            + [f"-D{name}={value}" for name, value in given.items()],
            env={k: v for k, v in os.environ.items() if k not in FINDERS},
            capture_output=True,
            text=True,
            timeout=120,
        )
        # CMake breaks lines of messages where they get long.
        return done.returncode == 0, " ".join((done.stdout + done.stderr).split())

    return configure


@pytest.fixture
def python_with_torch(tmp_path):
    """What answers as a Python would that has the torch package in this folder."""

    def python_with_torch(folder: Path) -> Path:
        script = tmp_path / "python_with_torch"
        script.write_text(f"#!{sys.executable}\nprint({str(folder)!r})\n")
        script.chmod(0o755)
        return script

    return python_with_torch
