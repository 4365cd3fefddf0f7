"""Finds the torch of the environment that libddp is being installed into, without importing it."""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import target_environment

#: The oldest and the newest version that is tested.
SUPPORTED = ((2, 11), (2, 15))
#: What is installed where there is no torch yet. A range, because the newest version is not made for
#: every Python that libddp works with; an installer takes the newest that is.
DEFAULT_REQUIREMENT = "torch>={}.{},<{}.{}".format(*SUPPORTED[0], SUPPORTED[1][0], SUPPORTED[1][1] + 1)


@dataclass(frozen=True)
class Torch:
    """One installed torch."""

    folder: Path
    version: str

    @property
    def major_minor(self) -> tuple[int, int]:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def requirement(self) -> str:
        """The versions that a library built against this one works with."""
        return "torch=={}.{}.*".format(*self.major_minor)


def find_or_raise() -> Torch:
    """As ``find``, but says where it looked."""
    torch = find()
    if torch is None:
        looked = "\n  ".join(str(path) for path in _candidates())
        raise RuntimeError(
            f"libddp: no torch found for Python {sys.version_info.major}."
            f"{sys.version_info.minor}; looked at\n  {looked}\n"
            "Install torch first, or set LIBDDP_TORCH_DIR to the folder of the torch package."
        )
    return torch


@lru_cache(maxsize=1)
def find() -> Torch | None:
    """The first torch among the candidates. An unsupported version is an error, not a skip."""
    for folder in _candidates():
        version = _version(folder)
        if version is None:
            continue
        torch = Torch(folder, version)
        oldest, newest = SUPPORTED
        if not oldest <= torch.major_minor <= newest:
            raise RuntimeError(
                f"libddp supports torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}; this "
                f"environment has {version} ({folder}). Install a supported torch first."
            )
        return torch
    return None


def _candidates() -> Iterator[Path]:
    """Folders where the torch package may be, best first.

    1. ``LIBDDP_TORCH_DIR``.
    2. This interpreter's own path: a build without isolation, or torch already in the build
       environment.
    3. This interpreter's site-packages, which pip's isolation hides from ``sys.path``.
    4. Those of the environment that the build is for, where the installer builds with an
       interpreter of its own (uv, build): ``target_environment`` says which, and it is only one.
    """
    chosen = os.environ.get("LIBDDP_TORCH_DIR")
    if chosen:
        yield Path(chosen)
        return
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        yield Path(spec.origin).parent
    paths = sysconfig.get_paths()
    for folder in dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages()]):
        yield Path(folder) / "torch"
    if site.ENABLE_USER_SITE is not False:
        yield Path(site.getusersitepackages()) / "torch"
    if sys.prefix != sys.base_prefix and target_environment.sees_system_packages(Path(sys.prefix)):
        yield target_environment.site_packages(Path(sys.base_prefix)) / "torch"
    for folder in target_environment.packages_elsewhere():
        yield folder / "torch"


def _version(folder: Path) -> str | None:
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"__version__\s*=\s*'([^']+)'", text)
    return match.group(1) if match else None
