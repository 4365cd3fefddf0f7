"""Text -> train.bin, val.bin (token numbers), meta.json and, if one was made, tokenizer.json.

    python convert.py --source=books/ --data_dir=out/data                # a folder, a file
    python convert.py --source=s3://bucket/books --suffixes=.txt,.md     # what fsspec can open
    python convert.py --data_dir=out/data                                # Python's own sources

--tokenizer=auto takes GPT-2's tables where they can be had (see bpe.py) and else learns a tokenizer
from the text; it says which. Everything is read and written piece by piece, so a corpus may be
larger than memory. Files are read in an order that hangs on their names alone; the last part of the
whole is held back for validation.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bpe
import numpy as np
from corpus import Source, open_source
from shared import UserError, key, parse, run_script

FORMAT = 1
META = "meta.json"


@dataclass
class ConvertSettings:
    source: str = key("", "a folder, file or fsspec URL; empty: Python's own standard library")
    data_dir: str = key("out/gpt2_fsdp/data", "folder to write")
    suffixes: tuple[str, ...] = key((".txt", ".md"), "files of a folder that are read; empty: all")
    tokenizer: str = key(
        "auto", "auto, gpt2, train, a tokenizer.json, or a folder with GPT-2's tables"
    )
    vocab_size: int = key(4096, "tokens of a tokenizer that is learned from the text")
    train_mib: float = key(64.0, "so much of the text is read to learn a tokenizer")
    val_share: float = key(0.1, "share of the text that is held back")
    corpus_mib: float = key(4.0, "size limit of the standard library's sources in MiB")


def convert(settings: ConvertSettings) -> dict:
    """Write the files; return what meta.json says. Raises: UserError, and then nothing counts."""
    if not 0 < settings.val_share < 1:
        raise UserError(f"--val_share={settings.val_share}: expected 0 < val_share < 1")
    source = open_source(settings.source, settings.suffixes, int(settings.corpus_mib * 2**20))
    tokenizer = bpe.choose(
        settings.tokenizer,
        lambda: _some(source, int(settings.train_mib * 2**20)),
        settings.vocab_size,
    )
    folder = Path(settings.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / META).unlink(missing_ok=True)  # from here on the old files do not count
        counts, dtype = _write(folder, source, tokenizer, settings.val_share)
        meta = {"format": FORMAT, "origin": {"source": source.name}, "dtype": dtype.__name__}
        meta |= {"vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
        meta |= {"tokenizer": tokenizer.save(folder), **counts}
        _replace(folder / META, json.dumps(meta, indent=2))
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror or error}") from error
    return meta


def _some(source: Source, limit_bytes: int) -> Iterator[str]:
    """The beginning of the corpus, for a tokenizer to learn from."""
    for piece in source.pieces():
        yield piece.text
        limit_bytes -= piece.size_bytes
        if limit_bytes <= 0:
            return


def _write(folder: Path, source: Source, tokenizer, val_share: float) -> tuple[dict, type]:
    """Both parts, each written under another name first. An end of text follows each file."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    fresh = {split: folder / f"{split}.bin.new" for split in ("train", "val")}
    counts, seen, cut = dict.fromkeys(fresh, 0), 0, source.size_bytes * (1 - val_share)
    with open(fresh["train"], "wb") as train, open(fresh["val"], "wb") as val:
        files = {"train": train, "val": val}
        for piece in source.pieces():
            split = "train" if seen < cut else "val"
            numbers = tokenizer.encode(piece.text)
            if piece.last:
                numbers.append(tokenizer.end_of_text)
            files[split].write(np.array(numbers, dtype=dtype).tobytes())
            counts[split] += len(numbers)
            seen += piece.size_bytes
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for split, path in fresh.items():
        os.replace(path, folder / f"{split}.bin")
    return {f"{split}_tokens": count for split, count in counts.items()}, dtype


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def main(arguments: list[str]) -> int:
    settings = parse(ConvertSettings, arguments)
    meta = convert(settings)
    counts = f"{meta['train_tokens']} tokens to train on, {meta['val_tokens']} held back"
    print(f"{settings.data_dir}: {counts}, {meta['vocab_size']} in the vocabulary")
    print(f"tokenizer: {meta['tokenizer']['words']}")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "convert.py"))
