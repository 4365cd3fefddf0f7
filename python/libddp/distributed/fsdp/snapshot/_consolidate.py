"""One safetensors file of a whole model, from the model or from a sharded checkpoint."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist

from libddp._load import load
from libddp.distributed._groups import native
from libddp.distributed.fsdp.snapshot import _model_tensors
from libddp.distributed.fsdp.snapshot._files import INDEX, Snapshot
from libddp.distributed.fsdp.snapshot._model_tensors import MODEL
from libddp.distributed.fsdp.snapshot._safetensors import Writer
from libddp.distributed.fsdp.state import _collective_errors
from libddp.distributed.fsdp.state._shard_specs import whole_of
from libddp.distributed.fsdp.state._sharded_state_dict import sharded_state
from libddp.errors import SnapshotError

_C = load()


@torch.no_grad()
def save_safetensors(model: torch.nn.Module, path: str | os.PathLike) -> None:
    """Writes the whole model into one file; a collective of all ranks.

    One parameter after the other is gathered and written by rank 0, so that no rank needs the
    memory of the whole model. A parameter with several names is written once, under the first; the
    file's metadata has the others, as in files of `safetensors.torch.save_model`. The file appears
    under its name when it is whole.

    Args:
        model: sharded by FullyShardedDataParallel or fully_shard.
        path: of the file.

    Raises:
        SnapshotError: rank 0 cannot write, on every rank; names the path, and says why.

    Example:
        >>> save_safetensors(model, "model.safetensors")          # doctest: +SKIP
    """
    state, aliases = sharded_state(model), _model_tensors.aliases_of(model)
    values = {k: v for k, v in state.items() if torch.is_tensor(v) and k not in aliases}
    tensors = {key: (value.dtype, value.size()) for key, value in values.items()}

    def write() -> None:
        if dist.get_rank() != 0:
            for value in values.values():
                whole_of(value)
            return
        left = list(values.values())  # others wait in each of these collectives
        try:
            with Writer(Path(path), tensors, aliases) as file:
                for key in values:
                    file.write(key, whole_of(left.pop(0)))
        finally:
            for value in left:
                whole_of(value)

    _collective_errors.together([native(None)], f"write {path}", write)


def consolidate(folder: str | os.PathLike, path: str | os.PathLike, prefix="model.") -> int:
    """Writes a sharded checkpoint's model into one file. One process, no process group.

    Args:
        folder: what save_snapshot, libddp.Snapshot (its newest) or torch's DCP has written.
        path: of the file.
        prefix: what the keys of the model begin with; it is left out in the file.

    Returns:
        The number of tensors in the file.

    Raises:
        SnapshotError: the checkpoint is damaged, nothing in it begins with `prefix`, or `path`
            cannot be written.
    """
    found = _opened(Path(folder))
    tensors = {k: v for k, v in found.tensors.items() if k.startswith(prefix)}
    if not tensors:
        raise SnapshotError(
            f"libddp: nothing in {folder} begins with {prefix!r}; there are "
            f"{sorted(found.tensors)[:3]} and others. "
            "Hint: pass the prefix under which the model was saved."
        )
    aliases = {k[len(prefix) :]: v[len(prefix) :] for k, v in found.aliases.items()}
    names = {k[len(prefix) :]: v for k, v in tensors.items()}
    with Writer(Path(path), names, aliases) as file:
        for name in names:
            file.write(name, found.read(prefix + name))
    return len(names)


def _opened(folder: Path) -> _Snapshot | _OldSnapshot | _Dcp:
    snapshots = _C.SnapshotFolder(os.fsencode(folder))
    if newest := snapshots.list():
        return _Snapshot(snapshots, newest[0])
    return _OldSnapshot(folder) if (folder / INDEX).exists() else _Dcp(folder)


class _Snapshot:
    """Ours, each byte checked on its way."""

    def __init__(self, snapshots, newest: tuple[int, int, bytes]) -> None:
        self._version = snapshots.open_version(*newest)
        self.tensors = {
            key: (dtype, torch.Size(shape)) for key, (dtype, shape) in self._version.tensors.items()
        }
        model = json.loads(self._version.values).get("model") or {}
        names = model.get("aliases") or {}
        self.aliases = {MODEL + name: MODEL + first for name, first in names.items()}

    def read(self, key: str) -> torch.Tensor:
        dtype, shape = self.tensors[key]
        found = torch.empty(shape, dtype=dtype, device="cpu")
        _C.read_tensors(self._version, [(key, found)], len(os.sched_getaffinity(0)))
        return found


class _OldSnapshot:
    """Ours of before."""

    def __init__(self, folder) -> None:
        self._snapshot = Snapshot.open(Path(folder))
        self.tensors = {k: (t.dtype, t.shape) for k, t in self._snapshot.tensors.items()}
        self.aliases = self._snapshot.aliases

    def read(self, key: str) -> torch.Tensor:
        return self._snapshot.read(key, 0, math.prod(self.tensors[key][1]))


class _Dcp:
    """torch's. A parameter with several names is in it under each of them."""

    def __init__(self, folder) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (OSError, EOFError, ValueError) as error:
            raise SnapshotError(
                f"libddp: {folder} is no checkpoint: {error}. Hint: pass a folder of save_snapshot "
                "or of torch.distributed.checkpoint.save."
            ) from error
        self._folder = folder
        self.aliases: dict[str, str] = {}
        self.tensors = {
            key: (entry.properties.dtype, entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, key: str) -> torch.Tensor:
        import torch.distributed.checkpoint as dcp

        dtype, shape = self.tensors[key]
        state = {key: torch.empty(shape, dtype=dtype, device="cpu")}
        dcp.load(state, checkpoint_id=self._folder, no_dist=True)
        return state[key]
