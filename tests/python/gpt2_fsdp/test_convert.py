"""convert.py: files, tokenizers, pieces of text that change no token."""

import json
import re

import numpy as np
import pytest
from gpt2_runs import example

tokenizers = pytest.importorskip("tokenizers")
gpt2 = example()
UserError = gpt2.shared.UserError
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog;",
    "it's",
    "3",
    "o'clock.\n\n\tAnd",
    "then?\r\n",
]


def text_of(count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    gaps = np.array([" ", " ", "\n", "\n\n\n", "  ", "\u00a0", " \u00e9\u4e2d "])
    words, between = random.choice(WORDS, count), random.choice(gaps, count)
    return "".join(word + gap for word, gap in zip(words, between, strict=True))


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("a.txt", "b.md", "more/c.txt")):
        (folder / name).write_bytes(text_of(20_000, number).encode())
    (folder / "picture.png").write_bytes(b"\0\1\2")
    return folder


def convert(source, folder, *more):
    arguments = [f"--source={source}", f"--data_dir={folder}", "--vocab_size=300", *more]
    return gpt2.convert.convert(gpt2.shared.parse(gpt2.convert.ConvertSettings, arguments))


def all_tokens(folder, meta):
    return np.concatenate(
        [np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]) for split in ("train", "val")]
    )


def test_a_folder_gives_the_tokens_of_its_whole_files(tmp_path, books):
    out = tmp_path / "data"
    meta = convert(books, out, "--tokenizer=train")
    assert meta == json.loads((out / "meta.json").read_text())
    assert (meta["dtype"], meta["vocab_size"]) == ("uint16", 300)
    assert meta["tokenizer"]["kind"] == "learned BPE"
    tokens = all_tokens(out, meta)
    assert len(tokens) == meta["train_tokens"] + meta["val_tokens"]
    assert 0.05 < meta["val_tokens"] / len(tokens) < 0.15

    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    end = meta["end_of_text"]
    parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    assert len(parts) == 4  # three files
    assert len(parts[-1]) == 0
    found = {tuple(part[:-1].tolist()) for part in parts[:-1]}
    for name in ("a.txt", "b.md", "more/c.txt"):
        text = (books / name).read_bytes().decode()
        assert tuple(tokenizer.encode(text).ids) in found
    assert not list(out.glob("*.new"))
    corpus = gpt2.tokens.Tokens(out)
    corpus.check(64)


def test_urls_and_single_files_give_the_same(tmp_path, books):
    one = convert(books / "a.txt", tmp_path / "one", "--tokenizer=train")
    two = convert(f"file://{books}/a.txt", tmp_path / "two", "--tokenizer=train")
    assert all(all_tokens(tmp_path / "one", one) == all_tokens(tmp_path / "two", two))


def test_pieces_are_bounded_and_whole(tmp_path):
    text = text_of(200_000, 9)
    (tmp_path / "big.txt").write_bytes(text.encode())
    source = gpt2.corpus.open_source(str(tmp_path), (".txt",), 0)
    pieces = list(source.pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert sum(piece.size_bytes for piece in pieces) == source.size_bytes == len(text.encode())
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    size = source.size_bytes // 64
    assert max(piece.size_bytes for piece in pieces) < 2 * size
    assert len(pieces) >= 64


def test_tables_by_path(tmp_path, books):
    first = tmp_path / "first"
    convert(books, first, "--tokenizer=train")
    by_file = convert(books, tmp_path / "by_file", f"--tokenizer={first / 'tokenizer.json'}")
    assert by_file["tokenizer"]["kind"] == "BPE"
    assert (tmp_path / "by_file" / "train.bin").read_bytes() == (first / "train.bin").read_bytes()

    model = json.loads((first / "tokenizer.json").read_text())["model"]
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tables / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    convert(books, tmp_path / "by_tables", f"--tokenizer={tables}")
    assert (tmp_path / "by_tables" / "train.bin").read_bytes() == (first / "train.bin").read_bytes()


def test_auto_learns_where_the_tables_are_not_to_be_had(tmp_path, books, monkeypatch):
    def unreachable(repository, file):
        raise gpt2.hub.HubError("no network")

    monkeypatch.setattr(gpt2.bpe, "fetch", unreachable)
    monkeypatch.setattr(gpt2.bpe, "_from_tiktoken", lambda: unreachable("", ""))
    assert convert(books, tmp_path / "data")["tokenizer"]["kind"] == "learned BPE"
    with pytest.raises(UserError, match=r"--tokenizer=gpt2: .*not to be had \(hub: no network; "):
        convert(books, tmp_path / "data", "--tokenizer=gpt2")


def test_large_vocabularies_take_four_bytes(tmp_path, books):
    class Wide:
        vocab_size, end_of_text = 70_000, 69_999

        def encode(self, text):
            return [65_536 + len(text) % 7]

        def save(self, folder):
            return {"kind": "wide", "words": "wide"}

    source = gpt2.corpus.open_source(str(books), (".txt",), 0)
    _, dtype = gpt2.convert._write(tmp_path, source, Wide(), 0.5)
    assert dtype is np.uint32
    assert np.fromfile(tmp_path / "train.bin", dtype=dtype).min() >= 65_536


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good text " * 2000 + b"\xff\xfe", "not UTF-8 text (at offset 20000)"),
        (b"good text " * 2000 + b"\xe4\xb8", "not UTF-8 text (at offset 20000)"),
        (b"text\0text", "this is a binary file"),
    ],
)
def test_files_that_are_no_text(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        convert(tmp_path, tmp_path / "data", "--tokenizer=train")
    assert not (tmp_path / "data" / "meta.json").exists()


def test_mistakes_about_the_source(tmp_path, books):
    for source, message in (
        (tmp_path / "nowhere", "cannot read it: No such file or directory"),
        ("nowhere://x", "cannot read it: Protocol not known: nowhere"),
        (books / "more", r"no files that end in \.rst with anything in them"),
    ):
        with pytest.raises(UserError, match=message):
            convert(source, tmp_path / "data", "--tokenizer=train", "--suffixes=.rst")
    with pytest.raises(UserError, match="no such file or folder; auto, gpt2, train"):
        convert(books, tmp_path / "data", "--tokenizer=gpt-2")
