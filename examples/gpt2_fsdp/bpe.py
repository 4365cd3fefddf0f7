"""Tokenizers: GPT-2's own, wherever its tables are, or one that is learned from the text.

    tokenizer = choose("auto", lambda: iter(["some text"]), vocab_size=4096)
    tokenizer.encode("some text")      # a list of numbers
    tokenizer.save(folder)             # what meta.json keeps: kind and words

Where GPT-2's tables are looked for: a path (tokenizer.json, or a folder with vocab.json and
merges.txt), the hub's cache or the hub (huggingface_hub), tiktoken's cache or its server.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from hub import fetch
from shared import UserError

END_OF_TEXT = "<|endoftext|>"
HUB_NAME = "openai-community/gpt2"
TOKENIZER_FILE = "tokenizer.json"


class Bpe:
    """A tokenizer of the library `tokenizers`. Thread rule: any thread."""

    def __init__(self, tokenizer, kind: str, words: str):
        self._tokenizer, self._about = tokenizer, {"kind": kind, "words": words}
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        if self.end_of_text is None:
            raise UserError(f"{words}: it has no token {END_OF_TEXT}, which ends each file")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def save(self, folder: Path) -> dict:
        self._tokenizer.save(str(folder / TOKENIZER_FILE))
        return self._about | {"file": TOKENIZER_FILE}


class Tiktoken:
    """GPT-2's encoding in the library `tiktoken`. Thread rule: any thread."""

    def __init__(self, encoding):
        self._encoding = encoding
        self.vocab_size: int = encoding.n_vocab
        self.end_of_text: int = encoding.eot_token

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def save(self, folder: Path) -> dict:
        (folder / TOKENIZER_FILE).unlink(missing_ok=True)  # of an earlier conversion
        return {"kind": "GPT-2 BPE", "words": "GPT-2's, from tiktoken"}


def choose(wanted: str, texts: Callable[[], Iterator[str]], vocab_size: int):
    """The tokenizer that `wanted` asks for. Raises: UserError, saying where it was looked for."""
    if wanted == "train":
        return _learn(texts(), vocab_size)
    if wanted not in ("auto", "gpt2"):
        return _from_path(Path(wanted))
    reasons = []
    for attempt in (_from_hub, _from_tiktoken):
        try:
            return attempt()
        except Exception as error:  # each library raises what its HTTP library does
            words = (str(error) or type(error).__name__).splitlines()[0]
            reasons.append(f"{attempt.__name__.removeprefix('_from_')}: {words[:200]}")
    if wanted == "auto":
        return _learn(texts(), vocab_size)
    raise UserError(
        f"--tokenizer=gpt2: its tables are not to be had ({'; '.join(reasons)}); give a folder "
        "with vocab.json and merges.txt, or --tokenizer=train"
    )


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise UserError("convert.py needs tokenizers: pip install 'libddp[gpt2]'") from error
    return tokenizers


def _from_hub():
    path = fetch(HUB_NAME, TOKENIZER_FILE)
    return Bpe(_tokenizers().Tokenizer.from_file(str(path)), "GPT-2 BPE", "GPT-2's, from the hub")


def _from_tiktoken():
    import tiktoken

    return Tiktoken(tiktoken.get_encoding("gpt2"))


def _from_path(path: Path) -> Bpe:
    """A tokenizer.json, or a folder with one or with vocab.json and merges.txt."""
    library = _tokenizers()
    if path.is_dir() and (path / "merges.txt").exists() and not (path / TOKENIZER_FILE).exists():
        return Bpe(_from_tables(library, path), "BPE", f"GPT-2's pattern, tables of {path}")
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.exists():
        raise UserError(
            f"--tokenizer={path}: no such file or folder; auto, gpt2, train, a tokenizer.json, or "
            "a folder with vocab.json and merges.txt"
        )
    try:
        return Bpe(library.Tokenizer.from_file(str(file)), "BPE", f"that of {file}")
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer={path}: cannot read {file}: {error}") from error


def _from_tables(library, folder: Path):
    try:
        model = library.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--tokenizer={folder}: cannot read the tables: {error}") from error
    return _with_bytes(library, model)


def _with_bytes(library, model):
    """GPT-2's way around a table: bytes as letters, and its pattern of words."""
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _learn(texts: Iterator[str], vocab_size: int) -> Bpe:
    library = _tokenizers()
    tokenizer = _with_bytes(library, library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    words = "learned from the text, since GPT-2's tables are not here or not wanted"
    return Bpe(tokenizer, "learned BPE", words)
