"""The torch that a build finds: that of the environment it installs into, and no other.

Real installers build a small project whose backend only asks `target_torch`, writes down the answer
and gives up. The torches are folders with a version.py.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

BUILD = Path(__file__).parents[3] / "python" / "_build"

PROBE = """
import os
import target_torch

def get_requires_for_build_wheel(config_settings=None):
    with open(os.environ["FOUND"], "w") as answer:
        found = target_torch.find()
        answer.write(str(found.folder) if found else "none")
    raise SystemExit("asked")

def build_wheel(*arguments):
    raise SystemExit("not meant to build")
"""
TOML = '[build-system]\nrequires = []\nbuild-backend = "probe"\nbackend-path = ["."]\n'


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "parent" / "project"
    folder.mkdir(parents=True)
    for source in BUILD.glob("target_*.py"):
        shutil.copy(source, folder)
    (folder / "probe.py").write_text(PROBE)
    (folder / "pyproject.toml").write_text(TOML)
    return folder


def make_environment(folder: Path, torch: str | None = None) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    if torch:
        add_torch(folder, torch)
    return folder


def add_torch(environment: Path, version: str) -> None:
    package = torch_of(environment)
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{version}'\n")


def torch_of(environment: Path) -> Path:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / python / "site-packages" / "torch"


def ask(project: Path, *command, **variables) -> str:
    """What the probe found when `command` built it, standing in the project."""
    answer = project / "found"
    known = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "LIBDDP_TORCH_DIR", "PYTHONPATH")
        and not name.startswith("UV_")
    }
    cache = {"FOUND": str(answer), "UV_CACHE_DIR": str(project.parent / "cache")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=project,
        env=known | cache | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.exists(), done.stdout + done.stderr
    return answer.read_text()


def pip_install(environment: Path):
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    return [*pip, "install", "--no-index", "--disable-pip-version-check", "."]


def test_pip_into_an_empty_environment_finds_no_torch_of_others(project, tmp_path):
    empty = make_environment(tmp_path / "empty")
    make_environment(project.parent / ".venv", "2.15.0")
    foreign = make_environment(tmp_path / "foreign", "2.15.0")
    assert ask(project, *pip_install(empty)) == "none"
    assert ask(project, *pip_install(empty), VIRTUAL_ENV=foreign) == "none"
    assert ask(project, *pip_install(empty), CONDA_PREFIX=foreign) == "none"


def test_pip_finds_the_torch_of_its_own_environment(project, tmp_path):
    own = make_environment(tmp_path / "own", "2.14.0")
    foreign = make_environment(tmp_path / "foreign", "2.15.0")
    make_environment(project.parent / ".venv", "2.15.0")
    assert ask(project, *pip_install(own), VIRTUAL_ENV=foreign) == str(torch_of(own))


def test_a_torch_that_is_named_comes_first(project, tmp_path):
    own = make_environment(tmp_path / "own", "2.14.0")
    other = make_environment(tmp_path / "other", "2.13.0")
    named = torch_of(other)
    assert ask(project, *pip_install(own), LIBDDP_TORCH_DIR=named) == str(named)


@pytest.fixture
def load(monkeypatch):
    """A module of the backend, which is no package's."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, BUILD / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_without_a_torch_an_installer_may_take_each_that_is_supported(load):
    load("target_environment")
    wanted = Requirement(load("target_torch").DEFAULT_REQUIREMENT)
    # The newest is not made for every Python: 2.14 is the last one for 3.10.
    versions = ["2.10.0", "2.11.0", "2.14.1", "2.15.0", "2.16.0"]
    assert list(wanted.specifier.filter(versions)) == versions[1:4]


@pytest.fixture
def uv(load, tmp_path):
    """What is found for a uv that was started so."""
    module = load("target_environment")

    def packages(*arguments, **variables):
        texts = {name: str(value) for name, value in variables.items()}
        started = ("uv", *(str(part) for part in arguments))
        front_end = module.FrontEnd(
            Path("/bin/uv"), started, texts, tmp_path / "parent" / "project"
        )
        return module.packages_of(front_end)

    return packages


def test_uv_installs_where_its_rules_say(uv, project, tmp_path):
    empty = make_environment(tmp_path / "empty")
    foreign = make_environment(tmp_path / "foreign", "2.15.0")
    near = make_environment(project.parent / ".venv", "2.15.0")
    of = {path: [torch_of(path).parent] for path in (empty, foreign, near)}
    # What is named or activated is the one environment, with a torch or without.
    assert uv("pip", "install", "--python", empty, ".", VIRTUAL_ENV=foreign) == of[empty]
    assert uv("pip", "install", f"--python={empty}/bin/python", ".") == of[empty]
    assert uv("pip", "install", "-p", "3.11", ".", VIRTUAL_ENV=empty) == of[empty]
    assert uv("pip", "install", ".", VIRTUAL_ENV=empty, CONDA_PREFIX=foreign) == of[empty]
    assert uv("pip", "install", ".") == of[near]
    assert uv("pip", "install", "--target", "lib", ".") == [project / "lib"]
    # A project has an environment of its own, whatever is activated.
    assert uv("sync", VIRTUAL_ENV=foreign) == [torch_of(project / ".venv").parent]
    assert uv("sync", "--active", VIRTUAL_ENV=foreign) == of[foreign]
    assert uv("--color", "never", "sync", UV_PROJECT_ENVIRONMENT=empty) == of[empty]
    assert uv("tool", "install", ".", VIRTUAL_ENV=foreign) == []


BUILDER = """
import subprocess, sys
sys.exit(subprocess.call([sys.argv[1], "-c", "import probe; probe.get_requires_for_build_wheel()"]))
"""


def test_a_build_for_nowhere_takes_the_torch_of_the_front_ends_environment(project, tmp_path):
    """As `python -m build`: an interpreter made for the build, started from another environment."""
    front = make_environment(tmp_path / "front", "2.14.0")
    empty = make_environment(tmp_path / "empty")
    made = make_environment(tmp_path / "made") / "bin" / "python"
    foreign = make_environment(tmp_path / "foreign", "2.15.0")
    command = ("-c", BUILDER, made)
    found = ask(project, front / "bin" / "python", *command, VIRTUAL_ENV=foreign)
    assert found == str(torch_of(front))
    path = f"{front}/bin:{os.environ['PATH']}"
    assert ask(project, "env", f"PATH={path}", "python", *command) == str(torch_of(front))
    assert ask(project, empty / "bin" / "python", *command, VIRTUAL_ENV=foreign) == "none"
