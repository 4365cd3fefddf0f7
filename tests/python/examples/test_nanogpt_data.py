"""prepare.py and data.py: the corpus, its files, batches, the unigram baseline."""

import json
import math

import numpy as np
import prepare
import pytest
import torch
from config import UserError
from data import Corpus


def test_the_standard_library_is_the_same_text_each_time():
    text = prepare.standard_library(300_000)
    assert len(text) == 300_000
    assert text == prepare.standard_library(300_000)
    assert prepare.standard_library(200_000) == text[:200_000]
    assert set(text) <= set("\t\n") | set(map(chr, range(32, 127)))
    assert "import" in text


def test_files_hold_the_text(tmp_path, text_file):
    folder = prepare.prepare(str(text_file), tmp_path / "data", 0)
    meta = json.loads((folder / "meta.json").read_text())
    tokens = np.concatenate([np.fromfile(folder / f"{s}.bin", np.uint8) for s in ("train", "val")])
    assert meta["dtype"] == "uint8"
    assert "".join(meta["chars"][token] for token in tokens) == text_file.read_text()
    assert meta["val_tokens"] == len(tokens) // 10


def test_prepared_files_are_kept_until_the_text_changes(tmp_path, text_file, monkeypatch):
    reads = []
    original = prepare._read
    monkeypatch.setattr(prepare, "_read", lambda *a: reads.append(a) or original(*a))
    for expected in (1, 1):
        prepare.prepare(str(text_file), tmp_path / "data", 0)
        assert len(reads) == expected
    text_file.write_text("something else " * 100)
    folder = prepare.prepare(str(text_file), tmp_path / "data", 0)
    assert len(reads) == 2
    assert len(Corpus(folder, 8).chars) == len(set("something else "))


def test_many_characters_need_two_bytes(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + 300))) * 5, encoding="utf-8")
    corpus = Corpus(prepare.prepare(str(path), tmp_path / "data", 0), 16)
    assert corpus.tokens["train"].dtype == np.uint16
    assert corpus.tokens["train"].max() == 299


def test_a_url_is_read_through_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://book.txt", "wb") as file:
        file.write(b"call me anything. " * 50)
    folder = prepare.prepare("memory://book.txt", tmp_path / "data", 0)
    assert Corpus(folder, 8).source == "memory://book.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read it: No such file or directory"),
        (b"", "the file is empty"),
        (b" \n\n ", "the file is empty"),
        (b"abc\0def", "this is a binary file"),
        (b"abc\xff", r"not UTF-8 text \(byte 0xff at offset 3\)"),
    ],
)
def test_a_text_that_is_no_good_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        prepare.prepare(str(path), tmp_path / "data", 0)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["nosuchthing://a/b", "memory://not/there.txt"])
def test_a_bad_url_is_named(tmp_path, url):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=f"--data={url}: cannot read it"):
        prepare.prepare(url, tmp_path / "data", 0)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(UserError, match="cannot read it: Is a directory"):
        prepare.prepare(str(tmp_path), tmp_path / "data", 0)


def test_a_text_shorter_than_the_context_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 100)
    folder = prepare.prepare(str(path), tmp_path / "data", 0)
    with pytest.raises(UserError, match="too short: 10 characters in the val part"):
        Corpus(folder, 10)
    assert Corpus(folder, 9).batch("val", (0,), 2)[0].shape == (2, 9)


def test_torn_files_are_noticed(tmp_path, text_file):
    folder = prepare.prepare(str(text_file), tmp_path / "data", 0)
    (folder / "train.bin").write_bytes(b"123")
    with pytest.raises(UserError, match="3 tokens instead of"):
        Corpus(folder, 2)


def test_batches_depend_on_the_draw_alone(tmp_path, text_file):
    corpus = Corpus(prepare.prepare(str(text_file), tmp_path / "data", 0), 16)
    x, y = corpus.batch("train", (1337, 5, 0), 4)
    assert x.dtype == torch.int64
    assert x.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, corpus.batch("train", (1337, 5, 0), 4)[0])
    for other in (("train", (1337, 5, 1)), ("train", (1337, 6, 0)), ("val", (1337, 5, 0))):
        assert not torch.equal(x, corpus.batch(*other, 4)[0])


def test_unigram_baseline(tmp_path):
    path = tmp_path / "ab.txt"
    path.write_text("ab" * 5000)
    corpus = Corpus(prepare.prepare(str(path), tmp_path / "data", 0), 16)
    assert corpus.unigram_baseline() == pytest.approx(math.log(2), abs=1e-3)
    path.write_text("a" * 9000 + "b" * 1000)  # 'b' is held back entirely
    corpus = Corpus(prepare.prepare(str(path), tmp_path / "data", 0), 16)
    assert corpus.unigram_baseline() == pytest.approx(math.log(9002))
