"""report.py, plot.py, schedule and signals: what a run shows and obeys."""

import itertools
import json
import os
import resource
import signal

import pytest
from checkpoint import StopSignal
from config import UserError
from plot import plot
from report import Metrics, Progress, Stopwatch, read_metrics

pytest.importorskip("libddp.distributed", reason="libddp is not installed")
from train import TrainSettings, learning_rate


def write(folder, first, iterations, **more):
    target = Metrics(folder, first, **more)
    for iteration in iterations:
        target.write({"iter": iteration, "loss": 4.0 - iteration, "val_loss": None})
    target.close()


def test_metrics_append_without_duplicates(tmp_path):
    write(tmp_path, 0, [0, 1, 2])
    write(tmp_path, 2, [2, 3])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records == [{"iter": n, "loss": 4.0 - n, "val_loss": None} for n in range(4)]


def test_a_torn_last_line_is_left_out(tmp_path):
    write(tmp_path, 0, [0, 1])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iter": 2, "lo')
    assert [record["iter"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    write(tmp_path, 2, [2])
    assert [record["iter"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_full_disk_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    target = Metrics(tmp_path, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: File too large"):
            target.write({"iter": 0, "loss": 1.0, "more": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    target.close()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/metrics.jsonl: "):
        Metrics(tmp_path / "file", 0)


def test_a_new_run_starts_a_new_file(tmp_path):
    write(tmp_path, 0, [0, 1])
    write(tmp_path, 0, [0])
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, [0, 1], tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 4.0), (1, 3.0)]
    assert "val_loss" not in events.Tags()["scalars"]


def test_log_line(capsys):
    progress = Progress(0, 200)
    progress.log(100, 2.12344, 0.2105, 9752.4)
    assert capsys.readouterr().out == "iter 100: loss 2.1234, time 210.50ms, 9,752 tokens/s\n"
    progress.log(100, 2.12344, 0.2105, 9752.4, mfu=0.4012)
    assert capsys.readouterr().out.endswith("9,752 tokens/s, mfu 40.12%\n")


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(2, 4)
    progress.log(2, 1.5, 0.1, 1000.0)
    progress.say("a line")
    progress.advance()
    progress.advance()
    progress.close()
    captured = capsys.readouterr()
    assert "a line\n" in captured.out
    assert "4/4" in captured.err
    assert "loss 1.5000" in captured.err


def test_the_clock_leaves_out_what_is_paused(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("report.time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    now[0] += 2
    watch.lap()
    with watch.paused():
        now[0] += 50
    now[0] += 4
    watch.lap()
    assert watch.mean() == 3.0
    now[0] += 1
    watch.lap()
    assert watch.mean() == 1.0
    assert watch.mean() is None


def test_plot(tmp_path):
    with pytest.raises(UserError, match="no metrics to draw"):
        plot(tmp_path)
    pytest.importorskip("matplotlib")
    target = Metrics(tmp_path, 0)
    for n in range(5):
        value = 4.1 - n if n % 2 else None
        target.write({"iter": n, "loss": 4.0 - n, "val_loss": value, "unigram_baseline": 3.3})
    target.close()
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_schedule():
    settings = TrainSettings(
        learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=12, lr_decay_iters=0
    )
    rates = [learning_rate(i, settings) for i in range(14)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.55)  # half-way down
    assert rates[12:] == [0.1, 0.1]
    assert all(a > b for a, b in itertools.pairwise(rates[4:13]))
    settings.decay_lr = False
    assert learning_rate(11, settings) == 1.0
    settings.decay_lr, settings.warmup_iters = True, 40  # longer than the decay
    assert learning_rate(41, settings) == 0.1


def test_signals_are_remembered_and_handlers_restored():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.signum == 0
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # at once: from the terminal and from the launcher
        assert stop.name() == "SIGINT"
        stop.PATIENCE_SECONDS = -1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
