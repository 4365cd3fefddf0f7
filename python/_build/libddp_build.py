"""The build backend of libddp: scikit-build-core, plus finding the torch to build against.

Plain ``pip install .`` runs this in an isolated environment without torch. The library must be built
against the torch of the environment it is installed *into*, so that one is found by path
(see ``target_torch``). Only where there is none, torch becomes a build requirement; the wheel then
depends on the same version, so an installer fetches it once from its cache.
"""

from __future__ import annotations

import os
from typing import Any

import target_torch
from scikit_build_core import build as _skbuild
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """scikit-build-core's own (cmake, ninja where missing), and torch where there is none."""
    return _skbuild.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """As for a wheel."""
    return _skbuild.get_requires_for_build_editable(config_settings) + _torch_requirement()


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds against the torch that was found."""
    return _skbuild.build_wheel(
        wheel_directory, _with_torch(config_settings), metadata_directory
    )


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds against the torch that was found; Python sources stay where they are."""
    return _skbuild.build_editable(
        wheel_directory, _with_torch(config_settings), metadata_directory
    )


def _torch_requirement() -> list[str]:
    return [] if target_torch.find() else [target_torch.DEFAULT_REQUIREMENT]


def _with_torch(config_settings: ConfigSettings) -> dict[str, Any]:
    torch = target_torch.find_or_raise()
    print(f"libddp: building against torch {torch.version} in {torch.folder}", flush=True)
    settings = dict(config_settings or {})
    settings["cmake.define.LIBDDP_TORCH_DIR"] = os.fspath(torch.folder)
    return settings
