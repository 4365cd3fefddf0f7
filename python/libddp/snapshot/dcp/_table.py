"""Which chunks of which tensors a save has: what torch.distributed.checkpoint calls its metadata.

Each chunk is a tensor of its own, whose key has its offsets, as a chunk of a tensor that is sharded
on any but its first dimension is no range of elements. The table is JSON, kept on each host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from libddp.errors import SnapshotError
from libddp.snapshot._values import Encoder, decode

#: Of the values of a save; libddp.Snapshot's own have a number.
FORMAT = "dcp-1"
TABLE = "table"


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, or with `dtype` None a value that is no tensor."""

    fqn: str
    dtype: str | None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    #: Of the whole tensor.
    shape: tuple[int, ...] = ()

    @staticmethod
    def of(item: WriteItem) -> Chunk:
        """What a plan's item writes."""
        if item.type == WriteItemType.BYTE_IO:
            return Chunk(item.index.fqn, None)
        data = item.tensor_data
        return Chunk(
            item.index.fqn,
            str(data.properties.dtype).removeprefix("torch."),
            tuple(data.chunk.offsets),
            tuple(data.chunk.sizes),
            tuple(data.size),
        )

    @property
    def key(self) -> str:
        """In the save."""
        if self.dtype is None:
            return value_key(self.fqn)
        return chunk_key(MetadataIndex(self.fqn, torch.Size(self.offsets)))

    def as_json(self) -> list[Any]:
        """What Chunk(*...) takes."""
        return [self.fqn, self.dtype, *(list(n) for n in (self.offsets, self.sizes, self.shape))]


def chunk_key(index: MetadataIndex) -> str:
    """Where a chunk lies."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def value_key(fqn: str) -> str:
    """Where the JSON of a value lies."""
    return f"{fqn}@value"


def text_tensor(text: str) -> torch.Tensor:
    """A text as a snapshot keeps it."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def tensor_text(tensor: torch.Tensor) -> str:
    """And back."""
    return tensor.numpy().tobytes().decode()


def table_text(chunks: list[Chunk], planner_data: dict[str, Any]) -> str:
    """JSON of a table; planner_data says how names come from nested dicts."""
    paths = Encoder("").encode(planner_data, "the planner's data")
    return json.dumps({"chunks": [chunk.as_json() for chunk in chunks], "planner": paths})


def metadata_of(text: str) -> Metadata:
    """The metadata that a table says.

    Raises:
        SnapshotError: it is none.
    """
    try:
        table = json.loads(text)
        found: dict[str, Any] = {}
        for entry in table["chunks"]:
            fqn, dtype, offsets, sizes, shape = entry
            if dtype is None:
                found[fqn] = BytesStorageMetadata()
                continue
            if fqn not in found:
                properties = TensorProperties(dtype=decode({"$dtype": dtype}, {}))
                found[fqn] = TensorStorageMetadata(properties, torch.Size(shape), [])
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            found[fqn].chunks.append(chunk)
        return Metadata(found, planner_data=decode(table["planner"], {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"libddp snapshot: its table cannot be read: {error!r}.") from error
