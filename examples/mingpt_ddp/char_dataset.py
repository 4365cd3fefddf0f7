"""Text as a data set of characters.

    train_set, test_set = load(config)
    x, y = train_set[0]                 # int64 [block_size] each; y is x, one character further on

The text comes through fsspec (a path, memory://, s3://, https://, ...), or from the sources of
Python's own standard library. Its last part is the test set, so no test sample overlaps a training
sample. The vocabulary is that of the whole text.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import storage
import torch
from errors import UserError
from torch.utils.data import Dataset

DEFAULT_CORPUS_BYTES = 2**22


@dataclass
class DataConfig:
    path: str
    block_size: int
    stride: int
    train_split: float
    truncate: float


class CharDataset(Dataset):
    """Windows of `block_size` characters, one every `stride`. Read-only, so any thread may use it.

    Args:
        tokens: int64 [length]
        chars: the vocabulary; a token is an index into it
    """

    def __init__(self, tokens: torch.Tensor, chars: str, block_size: int, stride: int):
        self.tokens, self.chars = tokens, chars
        self.block_size, self.stride = block_size, stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.block_size - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.stride
        window = self.tokens[start : start + self.block_size + 1]
        return window[:-1], window[1:]


def load(config: DataConfig) -> tuple[CharDataset, CharDataset]:
    """Return the training set and the test set. Raises: UserError."""
    text = _text(config.path)
    text = text[: int(len(text) * config.truncate)]
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")) or bytearray(4), dtype=torch.int32)
    used, tokens = torch.unique(codes, return_inverse=True)
    chars = "".join(map(chr, used.tolist()))
    split = int(len(text) * config.train_split)
    parts = {"training": tokens[:split], "test": tokens[split:]}
    for name, part in parts.items():
        if len(part) <= config.block_size:
            raise UserError(
                f"{_name(config.path)} is too short: {len(part)} characters in the {name} part, "
                f"data_config.block_size={config.block_size} needs {config.block_size + 1}. "
                "Hint: a longer text, a smaller block_size, or another train_split or truncate"
            )
    return tuple(
        CharDataset(part, chars, config.block_size, config.stride) for part in parts.values()
    )


def _name(path: str) -> str:
    return f"the corpus data_config.path={path}" if path else "the standard library"


def _text(path: str) -> str:
    if not path:
        return _standard_library()
    content = storage.read(path, "corpus")
    if content is None:
        raise UserError(
            f"cannot read {_name(path)}: No such file or directory. Hint: give the path of a "
            "UTF-8 text, or leave it out to train on Python's standard library"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read {_name(path)}: it is not UTF-8 text (byte 0x{content[error.start]:02x} "
            f"at offset {error.start}). Hint: iconv -t UTF-8 converts a text"
        ) from error


def _standard_library() -> str:
    """Printable ASCII of the top-level modules, in an order that is mixed but always the same."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    keep = bytes([9, 10, *range(32, 127)])
    drop = bytes(set(range(256)) - set(keep))
    content = b"".join(path.read_bytes() for path in paths)
    return content.translate(None, drop)[:DEFAULT_CORPUS_BYTES].decode("ascii")
