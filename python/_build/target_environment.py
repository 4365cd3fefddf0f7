"""Which environment a build is for, where that is not the one of the interpreter that builds.

pip runs a build backend with the interpreter that it installs into: that one's prefix is the
answer, and nothing else is asked. Two kinds of front end build with an interpreter made for it:

- uv installs into an environment that it chooses; it tells nobody, but chooses by rules that its
  command line, its variables and its folder decide. The same rules stand here.
- `python -m build` and its like install nowhere: the environment that they run in is the one whose
  torch they build against.

A variable such as VIRTUAL_ENV counts for uv alone: for pip it may name an environment that somebody
activated and that has nothing to do with this installation.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

#: uv's commands that install into the environment of a project.
_PROJECT_COMMANDS = ("sync", "run", "add", "remove", "lock", "export", "tree")


@dataclass(frozen=True)
class FrontEnd:
    """The process that asked for this build, as the kernel shows it."""

    program: Path
    arguments: tuple[str, ...]
    variables: dict[str, str]
    folder: Path

    @staticmethod
    def parent() -> FrontEnd | None:
        """None where the system hides it (another user's, no /proc)."""
        entry = Path("/proc") / str(os.getppid())
        try:
            program = (entry / "exe").resolve(strict=True)
            arguments = (entry / "cmdline").read_text(errors="replace").split("\0")[:-1]
            pairs = (entry / "environ").read_text(errors="replace").split("\0")
            folder = (entry / "cwd").resolve(strict=True)
        except OSError:
            return None
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        return FrontEnd(program, tuple(arguments), variables, folder)

    def option(self, *names: str) -> str | None:
        """The value of a command-line option, written either way."""
        for i, argument in enumerate(self.arguments):
            if argument in names and i + 1 < len(self.arguments):
                return self.arguments[i + 1]
            name, equals, value = argument.partition("=")
            if equals and name in names:
                return value
        return None

    def has(self, argument: str, variable: str) -> bool:
        set_to = self.variables.get(variable, "").lower()
        return argument in self.arguments or set_to in ("1", "true", "yes", "on", "y", "t")


def packages_elsewhere() -> list[Path]:
    """Folders of packages of the environment that this build is for; none: this interpreter's own.

    None too where nobody can know it: then torch becomes a requirement of the build, and
    LIBDDP_TORCH_DIR is the way to say which one is meant.
    """
    front_end = FrontEnd.parent()
    return packages_of(front_end) if front_end else []


def packages_of(front_end: FrontEnd) -> list[Path]:
    """As packages_elsewhere, for this front end."""
    if front_end.program.name == "uv":
        if target := front_end.option("--target"):
            return [front_end.folder / target]
        environment = _of_uv(front_end)
    else:
        environment = _of_python(front_end)
    if environment is None or environment.resolve() == Path(sys.prefix).resolve():
        return []
    folders = [site_packages(environment)]
    if sees_system_packages(environment):
        folders.append(site_packages(Path(sys.base_prefix)))
    return folders


def site_packages(environment: Path) -> Path:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / python / "site-packages"


def sees_system_packages(environment: Path) -> bool:
    try:
        config = (environment / "pyvenv.cfg").read_text()
    except OSError:
        return False
    return re.search(r"include-system-site-packages\s*=\s*true", config, re.I) is not None


def _of_python(front_end: FrontEnd) -> Path | None:
    """The environment of the interpreter that the front end runs in, if it is a Python."""
    if not front_end.program.name.startswith("python") or not front_end.arguments:
        return None
    name = front_end.arguments[0]
    found = shutil.which(name, path=front_end.variables.get("PATH", ""))
    path = front_end.folder / (found or name)
    try:
        if path.resolve(strict=True) != front_end.program:
            return None  # the name that it was started under says nothing
    except OSError:
        return None
    return _environment_of(path)


def _environment_of(interpreter: Path) -> Path:
    """As Python finds its prefix: pyvenv.cfg lies above the link that was called, if anywhere."""
    environment = interpreter.parent.parent
    if (environment / "pyvenv.cfg").exists():
        return environment
    return interpreter.resolve().parent.parent


def _of_uv(uv: FrontEnd) -> Path | None:
    known = (*_PROJECT_COMMANDS, "pip", "tool", "build", "venv")
    command = next((part for part in uv.arguments[1:] if part in known), "")
    if command == "tool":
        return None  # an environment of its own, empty until this is built
    if command in _PROJECT_COMMANDS:
        return _uv_project(uv)
    if prefix := uv.option("--prefix"):
        return uv.folder / prefix
    return _uv_python(uv) or _uv_found(uv)


def _uv_python(uv: FrontEnd) -> Path | None:
    """An environment or an interpreter that was named; a version ("3.12") names neither."""
    value = uv.option("--python", "-p") or uv.variables.get("UV_PYTHON")
    if not value:
        return None
    path = uv.folder / value
    if path.is_dir():
        return path
    found = shutil.which(value, path=uv.variables.get("PATH", ""))
    if path.is_file() or found:
        return _environment_of(path if path.is_file() else uv.folder / str(found))
    return None


def _uv_found(uv: FrontEnd) -> Path | None:
    """Where nothing was named: the first of these is the one, whether or not it has a torch."""
    if uv.has("--system", "UV_SYSTEM_PYTHON"):
        return Path(sys.base_prefix)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if uv.variables.get(name):
            return uv.folder / uv.variables[name]
    return _nearest(uv.folder, ".venv")


def _uv_project(uv: FrontEnd) -> Path | None:
    if "--active" in uv.arguments and uv.variables.get("VIRTUAL_ENV"):
        return uv.folder / uv.variables["VIRTUAL_ENV"]
    start = uv.folder / (uv.option("--project") or "")
    project = _nearest(start, "pyproject.toml")
    if project is None:
        return None
    # A member of a workspace shares the environment of the workspace's root.
    root = _nearest(project.parent, "uv.lock") or project
    return root.parent / uv.variables.get("UV_PROJECT_ENVIRONMENT", ".venv")


def _nearest(start: Path, name: str) -> Path | None:
    """`name` in the folder or the closest of its parents."""
    for folder in (start, *start.parents):
        if (folder / name).exists():
            return folder / name
    return None
