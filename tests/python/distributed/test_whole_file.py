"""Files that are whole or not there."""

import os
import stat

import pytest
from libddp._whole_file import write_text


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "status.json"
    for text in ("first", "second, longer"):
        write_text(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "text", "\udcff")
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none" / "text", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_pipe_stays_one(tmp_path):
    """As /dev/null does, which root could replace: torch names it where there are no logs."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(path, "text")
        assert os.read(reading, 100) == b"text"
    finally:
        os.close(reading)
    assert stat.S_ISFIFO(path.stat().st_mode)
