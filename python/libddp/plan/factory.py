"""Makes the model that somebody names on a command line, without giving it memory.

factory = find_factory("examples/nanogpt/model.py:GPT")
model = call_factory(factory, {"n_layer": 12, ...})    # inside a FakeTensorMode
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from libddp.errors import ArgumentError


def find_factory(name: str) -> Callable[..., Any]:
    """A class or function, by "module:name" or "path/to/file.py:name".

    Raises:
        ArgumentError: the module cannot be imported, or has no such name.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ArgumentError(
            f"--model {name!r} names no factory. Hint: MODULE:NAME or FILE.py:NAME, where NAME is "
            "a class or a function that returns a torch.nn.Module."
        )
    module = _imported(place)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        public = [n for n, v in vars(module).items() if inspect.isclass(v) or inspect.isfunction(v)]
        raise ArgumentError(
            f"--model {name!r}: {place!r} has nothing to call under the name {attribute!r}. "
            f"Hint: it has {', '.join(sorted(n for n in public if n[0] != '_')[:12]) or 'nothing'}."
        )
    return found


def _imported(place: str):
    path = Path(place)
    folder = str(path.resolve().parent) if path.suffix == ".py" else str(Path.cwd())
    if path.suffix == ".py" and not path.is_file():
        raise ArgumentError(f"--model: there is no file {place!r}. Hint: FILE.py:NAME.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(path.stem if path.suffix == ".py" else place)
    except Exception as error:
        raise ArgumentError(
            f"--model: cannot import {place!r}: {type(error).__name__}: {error}. Hint: run it from "
            "the folder that its imports need, or set PYTHONPATH."
        ) from error


def call_factory(factory: Callable[..., Any], arguments: dict | list) -> nn.Module:
    """Calls it with keywords (a dict) or positions (a list).

    A factory whose only required parameter is a dataclass takes the dataclass's fields.

    Raises:
        ArgumentError: it raised, or returned no module.
    """
    name = getattr(factory, "__name__", str(factory))
    try:
        config = _config_class(factory) if isinstance(arguments, dict) else None
        if config is not None:
            model = factory(config(**arguments))
        elif isinstance(arguments, dict):
            model = factory(**arguments)
        else:
            model = factory(*arguments)
    except Exception as error:
        raise ArgumentError(
            f"--model: {name} raised {type(error).__name__}: {error}. Hint: pass its arguments as "
            f"--model-args '{{...}}'; it takes {_signature(factory)}. Its tensors have no data, so "
            "it cannot read values."
        ) from error
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"--model: {name} returned a {type(model).__name__}, not a torch.nn.Module. "
            "Hint: name the class or function that makes the model."
        )
    return model


def _config_class(factory: Callable[..., Any]) -> type | None:
    """The dataclass that is all a factory needs; None where it needs something else."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    required = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) != 1:
        return None
    hint = typing.get_type_hints(function).get(required[0].name)
    return hint if inspect.isclass(hint) and dataclasses.is_dataclass(hint) else None


def _signature(factory: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(factory))
    except (TypeError, ValueError):
        return "unknown arguments"
