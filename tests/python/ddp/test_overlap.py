"""`libddp overlap`: numbers, image and errors, over traces of known times."""

import builtins
import json

import pytest
from libddp.__main__ import main
from libddp._overlap import intersection


def event(rank, name, begin_ms, end_ms):
    category = "communication" if name.startswith("bucket") else "computation"
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": 0,
        "ts": begin_ms * 1000,
        "dur": (end_ms - begin_ms) * 1000,
    }


def write(path, events, producer="libddp"):
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"producer": producer}}))
    return str(path)


@pytest.fixture
def trace(tmp_path):
    events = [{"ph": "M", "name": "process_name", "pid": 0}]
    for rank in (0, 1):
        for start in (0, 100, 200):
            events += [
                event(rank, "forward", start, start + 10),
                event(rank, "backward", start + 10, start + 40),
                event(rank, "wait", start + 40, start + 50),
                event(rank, "bucket 0", start + 20, start + 30 + 5 * rank),
                event(rank, "bucket 1", start + 35, start + 45),
            ]
    return write(tmp_path / "trace.json", events)


def test_a_line_per_rank(trace, capsys):
    assert main(["overlap", trace]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: backward 90.000 ms, communication 60.000 ms, hidden 45.000 ms, overlap 75.0 %",
        "rank 1: backward 90.000 ms, communication 75.000 ms, hidden 60.000 ms, overlap 80.0 %",
    ]


def test_no_communication_is_no_overlap(tmp_path, capsys):
    path = write(tmp_path / "trace.json", [event(0, "backward", 0, 1)])
    assert main(["overlap", path]) == 0
    assert "communication 0.000 ms, hidden 0.000 ms, overlap 0.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("passes", ["1", "3", "50"])
def test_the_image(trace, tmp_path, passes, capsys):
    pytest.importorskip("matplotlib")
    image = tmp_path / "overlap.png"
    assert main(["overlap", trace, "--output", str(image), "--passes", passes]) == 0
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_image_cannot_be_written(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("missing/overlap.png", "overlap.nothing"):
        assert main(["overlap", trace, "--output", str(tmp_path / name)]) == 1
        assert "libddp overlap: cannot write" in capsys.readouterr().err


def test_without_matplotlib(trace, tmp_path, capsys, monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["overlap", trace]) == 0
    assert main(["overlap", trace, "--output", str(tmp_path / "overlap.png")]) == 1
    assert "needs matplotlib" in capsys.readouterr().err


def test_what_is_no_trace(trace, tmp_path, capsys):
    assert main(["overlap", str(tmp_path / "missing.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    other = tmp_path / "other.json"
    foreign = write(tmp_path / "foreign.json", [event(0, "backward", 0, 1)], "another")
    empty = write(tmp_path / "empty.json", [])
    for text in ("not json", "[]", "{}", '{"otherData": 5}', "5"):
        other.write_text(text)
        assert main(["overlap", str(other)]) == 1
        assert "is no trace of libddp" in capsys.readouterr().err
    for path in (foreign, empty):
        assert main(["overlap", path]) == 1
        assert "Hint: write one with model.save_trace(path)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["overlap", trace, "--passes", "0"])
    assert "'0' is no number of 1 or more" in capsys.readouterr().err


def test_intersection():
    assert intersection([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert intersection([(0, 1)], [(1, 2)]) == []
    assert intersection([], [(1, 2)]) == []
    assert intersection([(0, 9)], [(1, 2), (3, 4)]) == [(1, 2), (3, 4)]
