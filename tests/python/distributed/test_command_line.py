"""The command `libddp`: wrong words are refused at once, with the nearest right one."""

import subprocess
import sys

import pytest

#: Runs a command with torch made impossible to import.
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from libddp.__main__ import main; "
    "sys.exit(main(sys.argv[1:]))"
)


def without_torch(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", [(), ("overlap",), ("plan",), ("consolidate",)])
def test_help(command):
    found = without_torch(*command, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(" ".join(("usage: libddp", *command)))
    assert "Exit status" in found.stdout or not command


def test_the_prefix_for_cmake():
    assert without_torch("--cmake-dir").stdout.strip().endswith("libddp")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pln",), "there is no 'pln'. Hint: did you mean plan?"),
        (("zzz",), "there is no 'zzz'. Hint: one of run, overlap, plan, consolidate"),
        (("plan", "--lenght", "3"), "there is no --lenght. Hint: did you mean --length?"),
        (("plan", "--lenght=3"), "there is no --lenght. Hint: did you mean --length?"),
        (("plan", "--dtype", "float8"), "'float8' is none of float32"),
        (("plan", "gpt2"), "too many arguments: gpt2"),
        (("overlap",), "the following arguments are required: trace"),
        (("overlap", "a.json", "--passes", "0"), "'0' is no number of 1 or more"),
        (("consolidate", "folder"), "the following arguments are required: output"),
        ((), "is required"),
    ],
)
def test_wrong_usage(arguments, words):
    found = without_torch(*arguments)
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert "Traceback" not in found.stderr
