"""Values of Python as JSON and tensors, and back: what a snapshot has beside a model.

    encoder = Encoder("rank-0.extra.")
    tree = encoder.encode({"lr": 0.1, "rng": torch.get_rng_state()}, "extra")
    encoder.tensors                       # key -> tensor
    decode(tree, tensors) == {...}

Never pickle: what comes back is what stands here, and nothing that a file says is run. JSON's own
values are themselves; everything else is an object with one key that begins with "$".
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch

from libddp.errors import ArgumentError, SnapshotError

#: JSON of a rank stands three levels deep in an index, of which libddp reads 32.
MAX_DEPTH = 24
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Encoder:
    """Collects the tensors of several values under keys that begin alike."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._known: dict[tuple, str] = {}

    def encode(self, value: Any, where: str, depth: int = 0) -> Any:
        """What json.dumps takes.

        Args:
            where: what the value is, for messages: "extra['sampler']".

        Raises:
            ArgumentError: a value of a type that a snapshot cannot give back, or nested too deep.
        """
        if depth > MAX_DEPTH:
            raise ArgumentError(
                f"libddp snapshot: {where[:200]} is nested deeper than {MAX_DEPTH} levels. "
                "Hint: flatten it."
            )
        if _is_json(value):
            return value
        if type(value) is int:
            return {"$int": str(value)}
        if type(value) is float:
            return {"$float": repr(value)}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, where, depth)
        if type(value) in (list, tuple, torch.Size, set, frozenset):
            return self._encode_sequence(value, where, depth)
        return self._encode_leaf(value, where)

    def _encode_mapping(self, value: Mapping, where: str, depth: int) -> Any:
        items = [
            (key, self.encode(item, f"{where}[{key!r}]", depth + 1)) for key, item in value.items()
        ]
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        named = [[self.encode(key, f"a key of {where}", depth + 1), item] for key, item in items]
        return {"$dict": named}

    def _encode_sequence(self, value: Any, where: str, depth: int) -> Any:
        items = [
            item if _is_json(item) else self.encode(item, f"{where}[{i}]", depth + 1)
            for i, item in enumerate(value)
        ]
        return items if type(value) is list else {f"${type(value).__name__.lower()}": items}

    def _encode_leaf(self, value: Any, where: str) -> Any:
        numpy = _numpy()
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            _refuse(value.layout, where, "keep a dense tensor in its place")
        if type(value) in _TENSORS:
            return {"$tensor": self._key_of(value)}
        if isinstance(value, torch.Tensor):
            _refuse(value, where, "give model and optimizer themselves, which know their parts")
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if type(value) is complex:
            return {"$complex": [self.encode(part, where) for part in (value.real, value.imag)]}
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in "biufc":
            return {"$array": self._key_of(torch.from_numpy(numpy.array(value)))}
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
            return {"$numpy": [str(value.dtype), self.encode(value.item(), where)]}
        _refuse(value, where, "convert it to numbers, texts, lists, dicts or tensors")

    def _key_of(self, tensor: torch.Tensor) -> str:
        """Two names of one tensor stay two names of one."""
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        known = self._known.get(place) if tensor.numel() else None
        if known is None:
            known = self._known[place] = f"{self._prefix}{len(self.tensors)}"
            self.tensors[known] = tensor.detach()
        return known


def _is_json(value: Any) -> bool:
    """Whether JSON has it as it is: asked of the hundreds of numbers of Python's random."""
    kind = type(value)
    if kind is int:
        return _SMALLEST <= value <= _LARGEST
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is str or kind is bool


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What Encoder.encode was given; Mappings are dicts, keys and tensors as they were.

    Raises:
        SnapshotError: it is none of its trees.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) if type(item) in (list, dict) else item for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not next(iter(tree)).startswith("$"):
        return {key: decode(item, tensors) for key, item in tree.items()}
    ((kind, content),) = tree.items()
    try:
        return _DECODERS[kind](content, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(
            f"libddp snapshot: its values have a {kind!r} that cannot be read: {error!r}."
        ) from error


def _numpy_value(content, _):
    numpy = _numpy()
    return numpy.dtype(content[0]).type(decode(content[1], {}))


_DECODERS = {
    "$int": lambda content, _: int(content),
    "$float": lambda content, _: float(content),
    "$complex": lambda content, _: complex(*(decode(part, {}) for part in content)),
    "$dict": lambda content, tensors: {
        decode(key, tensors): decode(item, tensors) for key, item in content
    },
    "$tuple": lambda content, tensors: tuple(decode(content, tensors)),
    "$size": lambda content, tensors: torch.Size(decode(content, tensors)),
    "$set": lambda content, tensors: set(decode(content, tensors)),
    "$frozenset": lambda content, tensors: frozenset(decode(content, tensors)),
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$dtype": lambda content, _: _dtype(content),
    "$device": lambda content, _: torch.device(content),
    "$tensor": lambda content, tensors: tensors[content],
    "$array": lambda content, tensors: tensors[content].numpy(),
    "$numpy": _numpy_value,
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return found


def _numpy():
    """None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _refuse(value: Any, where: str, hint: str):
    kind = value if isinstance(value, torch.layout) else type(value)
    name = str(kind) if kind is value else f"{kind.__module__}.{kind.__qualname__}"
    raise ArgumentError(
        f"libddp snapshot: {where[:200]} is a {name}, "
        f"which a snapshot cannot give back. Hint: {hint}."
    )
