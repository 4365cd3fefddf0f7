"""libddp snapshot export: one safetensors file of whole tensors."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

import torch

from libddp._load import load
from libddp._snapshot_command._address import open_folder
from libddp._snapshot_command._folder import Folder, Stored
from libddp._snapshot_command._pieces import Tensor, lacks, open_files, tensors_of
from libddp._snapshot_command._text import shown, shown_path
from libddp.distributed.fsdp.snapshot._safetensors import Writer
from libddp.errors import ArgumentError, SnapshotError
from libddp.plan.sizes import show_bytes
from libddp.snapshot._values import decode

_C = load()
_MODEL = "model."
#: Tensors that are read together: chunks that several of them share are read once. One that is
#: larger comes alone.
_BATCH_BYTES = 64 << 20


def run(chosen: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    folder = open_folder(chosen.folder)
    if chosen.output.is_dir():
        raise ArgumentError(f"{shown_path(chosen.output)} is a folder. Hint: name the file in it.")
    if chosen.output.exists() and not chosen.force:
        raise ArgumentError(
            f"{shown_path(chosen.output)} is there already. Hint: choose another name, or pass "
            "--force."
        )
    stored = folder.choose(chosen.step)
    number = _export(folder, stored, chosen)
    size = show_bytes(chosen.output.stat().st_size)
    print(f"{shown_path(chosen.output)}: {number} tensors of {stored.name}, {size}")
    return 0


def _export(folder: Folder, stored: Stored, chosen: argparse.Namespace) -> int:
    tensors = list(tensors_of(open_files(folder, stored)).values())
    if chosen.model_only:
        tensors = [tensor for tensor in tensors if tensor.key.startswith(_MODEL)]
    where = shown_path(stored.path)
    if not tensors:
        what = f"tensor that begins with '{_MODEL}'" if chosen.model_only else "tensor"
        raise SnapshotError(f"{where} has no {what}. Hint: libddp snapshot show says what it has.")
    for tensor in tensors:  # before memory is taken for what only a header says
        if lack := lacks(tensor):
            raise SnapshotError(
                f"{where}: {lack}. Hint: libddp snapshot verify says what is whole."
            )
    names = _names(where, tensors)
    version = folder.core.open_version(stored.step, stored.sequence, stored.path)
    types = {key: dtype for key, (dtype, _) in version.tensors.items()}
    announced = {names[t.key]: (types[t.key], t.shape) for t in tensors}
    aliases = _aliases(version.values, set(announced))
    threads = len(os.sched_getaffinity(0))
    with Writer(chosen.output, announced, aliases) as file:
        for batch in _batches(tensors, types):
            read = {t.key: torch.empty(t.shape, dtype=types[t.key], device="cpu") for t in batch}
            _C.read_tensors(version, list(read.items()), threads)
            for key, tensor in read.items():
                file.write(names[key], tensor)
    return len(tensors)


def _names(where: str, tensors: list[Tensor]) -> dict[str, str]:
    """Key -> name in the file."""
    names = {tensor.key: tensor.key.removeprefix(_MODEL) for tensor in tensors}
    known: dict[str, str] = {}
    for key, name in names.items():
        if name in known or name == "__metadata__" or not name:
            raise SnapshotError(
                f"{where}: '{shown(key)}' cannot be named '{shown(name)}' in the file"
                + (f", as '{shown(known[name])}' is" if name in known else "")
                + ". Hint: export with --model-only, or load it."
            )
        known[name] = key
    return names


def _aliases(values: str, names: set[str]) -> dict[str, str]:
    """Further names of parameters that have several -> the first one."""
    tree = json.loads(values)
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or "aliases" not in model:
        return {}
    found = decode(model["aliases"], {})
    if not isinstance(found, dict) or not all(
        isinstance(text, str) for item in found.items() for text in item
    ):
        raise SnapshotError("its values have aliases that are no names. Hint: take another copy.")
    return {name: first for name, first in found.items() if first in names}


def _batches(tensors: list[Tensor], types: dict[str, torch.dtype]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel * types[tensor.key].itemsize
        if batch and size + num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += num_bytes
    if batch:
        yield batch
