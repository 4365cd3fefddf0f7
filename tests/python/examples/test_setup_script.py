"""examples/setup.sh: installs once, again only after a change, and says what went wrong."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[3] / "examples" / "setup.sh"

# Stands in for the environment's interpreter: notes each call of pip, answers the questions about
# versions, and finds nothing missing on the system.
FAKE_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
    shift 2
    echo "pip $*" >> "$CALLS"
    if [ -n "$PIP_SECONDS" ]; then
        echo "Collecting torch"
        echo "  Building wheel for libddp (pyproject.toml): started" >&2
        sleep "$PIP_SECONDS"
        echo "what went wrong"
    fi
    exit "${PIP_STATUS:-0}"
fi
case "$2" in */_build) echo "$TORCH" ;; esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("examples", "libddp", "bindings", "python/_build", "venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("CMakeLists.txt", "pyproject.toml", "libddp/a.cpp", "bindings/b.cpp"):
        (tmp_path / name).write_text(name)
    shutil.copy(SETUP, tmp_path / "examples" / "setup.sh")
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(checkout, **more):
    environment = os.environ | {
        "LIBDDP_VENV": "venv",
        "CALLS": str(checkout / "calls"),
        "LIBDDP_EXTRAS": "examples",
    }
    return subprocess.run(
        ["bash", "-euc", '. examples/setup.sh; echo "$LIBDDP_VENV"'],
        cwd=checkout,
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(checkout) -> list[str]:
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_installs_once_and_again_after_a_change(checkout):
    first = setup(checkout)
    assert first.stdout == f"{checkout}/venv\n"
    assert "installing libddp[examples]" in first.stderr
    assert calls(checkout) == [
        f"pip install --disable-pip-version-check --progress-bar=off --verbose {checkout}[examples]"
    ]
    again = setup(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
    assert len(calls(checkout)) == 1

    (checkout / "libddp" / "a.cpp").write_text("changed")
    setup(checkout)
    assert len(calls(checkout)) == 2


def test_more_extras_are_added_without_building_again(checkout):
    setup(checkout)
    for _ in range(2):
        assert setup(checkout, LIBDDP_EXTRAS="test").returncode == 0
        assert setup(checkout).returncode == 0
    assert [call.split()[-1] for call in calls(checkout)] == [
        f"{checkout}[examples]",
        "libddp[test]",
    ]


def test_a_failed_installation_is_tried_again(checkout):
    failed = setup(checkout, PIP_STATUS="1")
    assert failed.returncode != 0
    assert failed.stdout == ""
    assert f"setup: pip install {checkout}[examples] failed" in failed.stderr
    assert setup(checkout).returncode == 0
    assert len(calls(checkout)) == 2


def test_a_missing_torch_is_installed_first(checkout):
    assert setup(checkout, TORCH="torch==2.15.*").returncode == 0
    assert [call.split()[-1] for call in calls(checkout)] == [
        "torch==2.15.*",
        f"{checkout}[examples]",
    ]


def test_says_for_how_long_and_what_it_does(checkout):
    result = setup(checkout, PIP_SECONDS="2.5", LIBDDP_BEAT="1")
    beats = result.stderr.splitlines()[1:-1]
    assert len(beats) >= 2
    wanted = r"setup: 0:\d\d libddp: (Building wheel for libddp \(pyproject.toml\)|what went wrong)"
    assert all(re.fullmatch(wanted, beat) for beat in beats), result.stderr
    assert "went wrong" not in result.stdout
    log = (checkout / "venv" / "libddp-install.log").read_text()
    assert log.splitlines()[0] == "Collecting torch"


def test_a_failure_shows_what_pip_said(checkout):
    result = setup(checkout, PIP_SECONDS="0", PIP_STATUS="1")
    assert "Collecting torch\n" in result.stderr
    assert "what went wrong\n" in result.stderr
    assert result.stderr.endswith(f"(all of it: {checkout}/venv/libddp-install.log)\n")


def test_missing_packages_are_named_where_they_cannot_be_installed(checkout):
    tools = checkout / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "id"):  # and neither a compiler nor apt-get
        (tools / name).symlink_to(shutil.which(name))
    result = setup(checkout, PATH=str(tools), LIBDDP_VENV="other", PYTHON="no-such-python")
    assert result.returncode != 0
    assert "missing system packages: g++ python3 python3-dev python3-venv" in result.stderr
    assert "apt-get install g++ python3" in result.stderr


# Stand in for what would change the system: each notes that it was called. `id` says who calls.
FAKE_TOOL = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'
FAKE_SUDO = FAKE_TOOL + '[ "$1" = -n ] && shift\nexec "$@"\n'


@pytest.fixture
def tools(checkout):
    """A system without compiler and Python, of a user whose number is in the file `uid`."""
    folder = checkout / "tools"
    folder.mkdir()
    for name in ("bash", "sh", "dirname", "basename", "env", "true", "cat"):
        (folder / name).symlink_to(shutil.which(name))
    fakes = {"sudo": FAKE_SUDO, "apt-get": FAKE_TOOL, "id": f"#!/bin/sh\ncat {folder}/uid\n"}
    for name, text in fakes.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "uid").write_text("1000")
    return folder


def need(checkout, tools, **more):
    return setup(checkout, PATH=str(tools), LIBDDP_VENV="other", PYTHON="no-such-python", **more)


def test_sudo_is_called_only_when_asked_for(checkout, tools):
    result = need(checkout, tools)
    assert result.returncode != 0
    assert "please install them (sudo apt-get install g++ python3" in result.stderr
    assert "LIBDDP_SUDO=1" in result.stderr
    assert calls(checkout) == []
    need(checkout, tools, LIBDDP_SUDO="1")
    assert calls(checkout)[0] == "sudo -n true"
    assert any(call.startswith("apt-get install -y -qq g++") for call in calls(checkout))


def test_root_installs_without_sudo(checkout, tools):
    (tools / "uid").write_text("0")
    need(checkout, tools)
    assert [call.split()[0] for call in calls(checkout)] == ["apt-get", "apt-get"]
