"""Every C++ snippet in README.md and docs compiles as it is printed, with the installed headers
alone, and runs on two ranks."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import snippets
import torch
from launches import finish, start

import libddp

ALL = [s for page in snippets.PAGES for s in snippets.of(page, "cpp") if not s.reason]
INCLUDE = re.compile(r"^#include <.*>$", re.M)
TORCH = Path(torch.__file__).parent


def program() -> str:
    """One function for each; the first argument says which one runs."""
    lines = ["#include <libddp/libddp.h>", "#include <torch/torch.h>", "#include <cstdlib>"]
    for snippet in ALL:
        lines += INCLUDE.findall(snippet.before) + INCLUDE.findall(snippet.text)
    for number, snippet in enumerate(ALL):
        lines += [f'#line 1 "before {snippet.place}"', f"static void snippet_{number}() {{"]
        lines.append(INCLUDE.sub("", snippet.before))
        lines += [f'#line {snippet.line} "{snippet.page}"', INCLUDE.sub("", snippet.text), "}"]
    calls = ", ".join(f"snippet_{number}" for number in range(len(ALL)))
    lines.append(f"int main(int, char** argv) {{ void (*all[])() = {{{calls}}};")
    lines.append("  all[std::atoi(argv[1])](); }")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "snippets.cpp").write_text(program())
    include, package = TORCH / "include", Path(libddp.__file__).parent
    library = package / "lib"
    command = [compiler, "-std=c++20", "-O0", "-w"]
    command += [f"-I{package / 'include'}", f"-isystem{include}"]
    command += [f"-isystem{include}/torch/csrc/api/include", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    command += ["snippets.cpp", "-o", "snippets", f"-L{library}", "-l:libddp.so"]
    command += [f"-L{TORCH}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    command += [f"-Wl,-rpath,{library}:{TORCH}/lib", "-Wl,--allow-shlib-undefined"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder / "snippets"


@pytest.mark.parametrize("number", range(len(ALL)), ids=lambda number: ALL[number].place)
def test_on_two_ranks(built, tmp_path, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [built, number]
    both = [start(command, tmp_path, RANK=str(rank), **place) for rank in range(2)]
    for status, output in finish(*both, deadline=60):
        assert status == 0, output
