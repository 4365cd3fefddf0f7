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


@pytest.mark.parametrize("command", [(), ("overlap",), ("plan",), ("consolidate",), ("snapshot",)])
def test_help(command):
    found = without_torch(*command, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(" ".join(("usage: libddp", *command)))
    assert "Exit status" in found.stdout or not command


@pytest.mark.parametrize("command", ["ls", "show", "verify", "persist", "export"])
def test_help_of_the_snapshot_commands(command):
    found = without_torch("snapshot", command, "--help")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"usage: libddp snapshot {command}")
    assert "Exit status" in found.stdout


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
        (("snapshot",), "the following arguments are required: ls|show|verify|persist|export"),
        (("snapshot", "verfy", "f"), "there is no 'verfy'. Hint: did you mean verify?"),
        (("snapshot", "ls"), "the following arguments are required: folder, or --run"),
        (("snapshot", "ls", "f", "--jsn"), "there is no --jsn. Hint: did you mean --json?"),
        (("snapshot", "show", "f", "--step", "-1"), "'-1' is no number of 0 or more"),
        (("snapshot", "show", "f", "--step", "x"), "'x' is no number of 0 or more"),
        (("snapshot", "verify", "f", "--all", "--step", "1"), "not allowed with argument"),
        (("snapshot", "persist", "f", "--timeout", "nan"), "'nan' is no number of seconds"),
        (("snapshot", "export", "f"), "the following arguments are required: output"),
        ((), "is required"),
    ],
)
def test_wrong_usage(arguments, words):
    found = without_torch(*arguments)
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert "Traceback" not in found.stderr
