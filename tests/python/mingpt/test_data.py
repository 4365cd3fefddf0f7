"""char_dataset.py and the configuration: windows, splits, and what is refused."""

import fsspec
import pytest
from mingpt_runs import LINE, UserError, config, mingpt
from omegaconf import OmegaConf

load = mingpt.char_dataset.load


def data(path, *overrides):
    return config(f"data_config.path={path}", *overrides).data_config


def spell(dataset, tokens) -> str:
    return "".join(dataset.chars[t] for t in tokens)


def test_windows_and_split(text_file):
    train, test = load(data(text_file))
    text = LINE * 40
    cut = int(len(text) * 0.9)
    assert train.chars == test.chars == "".join(sorted(set(text)))
    for dataset, part in ((train, text[:cut]), (test, text[cut:])):
        for index in (0, 1, len(dataset) - 1):
            x, y = dataset[index]
            start = 8 * index
            assert spell(dataset, x) == part[start : start + 16]
            assert spell(dataset, y) == part[start + 1 : start + 17]
        assert 8 * len(dataset) + 17 > len(part)  # no room for one more


def test_truncate_uses_the_beginning(text_file):
    train, test = load(data(text_file, "data_config.truncate=0.5"))
    assert len(train.tokens) + len(test.tokens) == 20 * len(LINE)


def test_text_by_url():
    with fsspec.open("memory://texts/book.txt", "wb") as file:
        file.write(("\u00e9\u4e16" * 300).encode())
    train, _ = load(data("memory://texts/book.txt"))
    assert train.chars == "\u00e9\u4e16"


def test_the_default_text_is_the_standard_library():
    train, test = load(config("data_config.path=''", "data_config.truncate=0.1").data_config)
    assert len(train.tokens) > 100_000
    assert train.chars.isascii()
    assert (train.tokens == load(config("data_config.truncate=0.1").data_config)[0].tokens).all()
    assert len(test.tokens) == pytest.approx(len(train.tokens) / 9, rel=0.01)


@pytest.mark.parametrize("path", ["nowhere.txt", "memory://nowhere/at/all.txt"])
def test_no_such_text(tmp_path, path):
    path = path if "://" in path else tmp_path / path
    message = rf"cannot read the corpus data_config.path={path}: No such file.*Hint: "
    with pytest.raises(UserError, match=message):
        load(data(path))


def test_unreadable_texts(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the corpus .*: .*directory\. Hint: "):
        load(data(tmp_path))
    with pytest.raises(UserError, match=r"cannot read the corpus zzz://x: .*zzz.*Hint: "):
        load(data("zzz://x"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9" * 100)
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 0xe9 at offset 3\)\. Hint: "):
        load(data(latin))


@pytest.mark.parametrize(("length", "part"), [(0, "training"), (17, "training"), (60, "test")])
def test_too_short(tmp_path, length, part):
    text = tmp_path / "short.txt"
    text.write_text("a" * length)
    message = rf"too short: \d+ characters in the {part} part, data_config.block_size=16 needs 17"
    with pytest.raises(UserError, match=message):
        load(data(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gpt_config.n_head=3", "gpt_config.n_embd=32 is not .*a multiple of n_head=3"),
        ("gpt_config.n_layer=two", "gpt_config.n_layer: .*'two'"),
        ("trainer_config.batch_size=0", "trainer_config.batch_size=0 is not .*above 0"),
        ("data_config.truncate=1.5", "data_config.truncate=1.5 is not .*at most 1"),
        ("trainer_config.amp_dtype=float64", "amp_dtype=float64 is not .*float16 or bfloat16"),
        ("trainer_config.snapshot_path=''", "snapshot_path= is not .*a path or URL"),
        ("+trainer_config.epochs=3", r"trainer_config\.epochs: .*epochs"),
        ("~trainer_config.seed", r"trainer_config\.seed: .*mandatory"),
    ],
)
def test_settings_that_cannot_be(override, message):
    with pytest.raises(UserError, match=message) as caught:
        config(override)
    assert ". Hint: " in str(caught.value)


def test_every_key_of_the_file_is_documented():
    keys = OmegaConf.load(mingpt.folder / "gpt2_train_cfg.yaml")
    page = (mingpt.folder.parents[1] / "docs" / "mingpt.md").read_text()
    sections = [s for s in keys if s.endswith("_config")]
    missing = [f"`{s}.{k}`" for s in sections for k in keys[s] if f"`{s}.{k}`" not in page]
    assert not missing
