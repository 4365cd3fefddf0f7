"""Format, lint and plain text rules over the whole tree."""

import re
import shutil
import subprocess
import sys

import pytest
import tree

TOP_LEVEL = {
    "CMakeLists.txt",
    "pyproject.toml",
    "libddp",
    "bindings",
    "python",
    "examples",
    "tests",
    "docs",
    "README.md",
    "LICENSE",
}


def run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=tree.ROOT, capture_output=True, text=True, check=False)


def test_top_level_holds_only_what_the_design_names():
    entries = {p.split("/")[0] for p in tree.tracked()}
    assert not {e for e in entries if e not in TOP_LEVEL and not e.startswith(".")}


def test_cpp_is_formatted():
    clang_format = shutil.which("clang-format")
    if clang_format is None:
        pytest.fail("clang-format is not installed (pip install clang-format==14.0.6)")
    sources = tree.files(".h", ".cpp")
    result = run(clang_format, "--dry-run", "-Werror", *sources)
    assert result.returncode == 0, result.stderr[:4000]


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_python_is_clean(arguments):
    result = run(sys.executable, "-m", "ruff", *arguments, "--no-cache", ".")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


def test_text_is_ascii():
    suffixes = (".h", ".cpp", ".py", ".pyi", ".md", ".txt", ".toml", ".sh", ".cmake", ".in")
    wrong = [p for p in tree.files(*suffixes) if not tree.read(p).isascii()]
    assert not wrong


def test_no_path_of_one_machine_is_written_down():
    hosts = "artifactory|mirror"
    pattern = re.compile(rf"/(work|root|home|farm)/[A-Za-z.]|/opt/venvs|https?://[^ ]*({hosts})")
    wrong = []
    for path in tree.tracked():
        try:
            text = tree.read(path)
        except UnicodeDecodeError:
            continue
        if path != "tests/house/test_style.py" and pattern.search(text):
            wrong.append(path)
    assert not wrong


def test_nothing_is_left_for_later_without_an_issue_number():
    pattern = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
    sources = tree.files(".h", ".cpp", ".py", ".cmake", ".sh")
    assert not [p for p in sources if "house" not in p and pattern.search(tree.read(p))]


def test_every_python_module_says_what_it_is():
    wrong = [
        p
        for p in tree.files(".py")
        if tree.read(p).strip() and not re.match(r'^(#![^\n]*\n)?"""', tree.read(p))
    ]
    assert not wrong


def test_every_header_opens_with_what_it_is():
    wrong = [
        p
        for p in tree.files(".h", under="libddp/")
        if not re.match(r"#pragma once\n\n//", tree.read(p))
    ]
    assert not wrong
