"""libddp snapshot verify."""

import json
import re

import pytest


def flip(path, at):
    """One bit of a file; negative: from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_whole_ones(saved, command):
    status, printed = command("verify", saved / "run")
    assert (status, printed.err) == (0, "")
    assert re.fullmatch(r"step 7 \(save 2\): whole; 2 files, .*, \d+\.\d\d GB/s\n", printed.out)
    status, printed = command("verify", saved / "run", "--all")
    assert status == 0
    assert re.findall(r"step (\d) \(save \d\): whole", printed.out) == ["7", "5"]
    assert "step 5" in command("verify", saved / "run", "--step", "5")[1].out


def test_a_flipped_bit(folder, command):
    path = folder / "step-5.1" / "rank-1-of-2.safetensors"
    flip(path, -1)
    assert command("verify", folder)[0] == 0
    for options in (["--step", "5"], ["--all"]):
        status, printed = command("verify", folder, *options)
        assert status == 1
        size = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        assert f"libddp snapshot verify: {path} is damaged: bytes 0 to {size} of" in printed.err
        assert "(bytes 0 to " in printed.err
        assert " of 'model." in printed.err
        assert "step 5 (save 1): damaged (1 found); 2 files" in printed.out
    assert "step 7 (save 2): whole" in printed.out


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: flip(path, 30), "its header has another checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "it has "),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_damaged_files(folder, command, damage, text):
    path = folder / "step-7.2" / "rank-0-of-2.safetensors"
    damage(path)
    flip(folder / "step-7.2" / "rank-1-of-2.safetensors", -1)
    status, printed = command("verify", folder)
    assert status == 1
    assert str(path) in printed.err
    assert text in printed.err
    assert "rank-1-of-2.safetensors is damaged" in printed.err  # the others are looked at, too
    assert "damaged (2 found)" in printed.out


def test_a_truncated_index(folder, command):
    path = folder / "step-7.2" / "index.json"
    path.write_bytes(path.read_bytes()[:-10])
    status, printed = command("verify", folder, "--all")
    assert status == 1
    assert f"{path}: not JSON" in printed.err
    assert "step 7 (save 2): damaged" in printed.out
    assert "step 5 (save 1): whole" in printed.out


def crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def sealed(index: dict) -> dict:
    """With the checksum of an index that says so."""
    plain = {key: value for key, value in index.items() if key != "crc32c"}
    text = json.dumps(plain, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return {**plain, "crc32c": crc32c(text.encode())}


def test_a_rank_that_an_index_has_lost(folder, command, tmp_path):
    path = folder / "step-7.2" / "index.json"
    index = json.loads(path.read_text())
    assert sealed(index) == index
    index["ranks"] = index["ranks"][:1]
    path.write_text(json.dumps(sealed(index)))
    status, printed = command("verify", folder)
    assert status == 1
    assert re.search(r"step-7.2: elements \d+ to \d+ of 'model\.\S+' are in no file", printed.err)
    output = tmp_path / "out.safetensors"
    status, printed = command("export", folder, output)
    assert status == 1
    assert "are in no file. Hint: libddp snapshot verify" in printed.err
    assert not output.exists()
