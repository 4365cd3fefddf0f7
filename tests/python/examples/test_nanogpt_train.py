"""train.py and sample.py: whole runs, alone and on two ranks."""

import json
import os
import signal
from pathlib import Path

import checkpoint
import killed_once
import nanogpt_runs
import pytest
import torch
from config import UserError
from launches import finish, launch, ranks
from report import read_metrics

pytest.importorskip("libddp.distributed", reason="libddp is not installed")
import sample
import train
from states import assert_same
from train import Ranks, Trainer

SCRIPT = Path(train.__file__)
CLOCK = ("ms", "tokens_per_second", "mfu")
TINY = [*nanogpt_runs.TINY, "--lr_decay_iters=20", "--eval_interval=10"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's variables, and a random state like a fresh interpreter's."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is so small that threads would only wait
    yield
    torch.set_num_threads(threads)


def run(out, text_file, *more) -> int:
    return train.main([*TINY, f"--out_dir={out}", f"--data={text_file}", *more])


def lines(out) -> list[dict]:
    """The metrics without what depends on the clock."""
    records = read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in CLOCK} for r in records]


def stop_in_iteration(monkeypatch, number: int) -> None:
    original = Trainer.step

    def step(self, rate):
        if self.iteration == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, rate)

    monkeypatch.setattr(Trainer, "step", step)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, text_file, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(whole, text_file, "--max_iters=20", "--dropout=0.1") == 0
    with monkeypatch.context() as patch:
        stop_in_iteration(patch, 6)
        assert run(parts, text_file, "--max_iters=20", "--dropout=0.1") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM at iteration 7 of 20; saved" in capsys.readouterr().out
    assert run(parts, text_file, "--max_iters=20", "--dropout=0.1") == 0
    assert f"resuming {parts} at iteration 7, training to 20" in capsys.readouterr().out

    assert lines(parts) == lines(whole)
    assert [r["iter"] for r in lines(whole)] == list(range(21))
    first, last = lines(whole)[0], lines(whole)[-1]
    assert last["val_loss"] < last["unigram_baseline"] < first["val_loss"]
    one, other = (torch.load(out / "ckpt.pt") for out in (whole, parts))
    for name in ("iter", "model", "optimizer", "best_val_loss"):
        assert_same(one[name], other[name])
    texts = [(out / "sample.txt").read_text() for out in (whole, parts)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 21


def test_a_run_that_crashed_goes_on_from_memory(tmp_path, text_file, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    keys = ["--max_iters=20", "--dropout=0.1", "--checkpoint_seconds=1e9"]
    assert run(whole, text_file, *keys) == 0
    original = Trainer.step

    def step(self, rate):
        if self.iteration == 14:
            raise RuntimeError("a crash")
        return original(self, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(RuntimeError, match="a crash"):
            run(parts, text_file, *keys, "--snapshot_every=3")
    assert not (parts / "ckpt.pt").exists()
    capsys.readouterr()
    assert run(parts, text_file, *keys, "--snapshot_every=3") == 0
    assert f"resuming {parts} at iteration 12, training to 20" in capsys.readouterr().out
    assert lines(parts) == lines(whole)
    one, other = (torch.load(out / "ckpt.pt") for out in (whole, parts))
    for name in ("iter", "model", "optimizer", "best_val_loss"):
        assert_same(one[name], other[name])
    # A checkpoint that is newer goes before it.
    assert run(parts, text_file, *keys, "--snapshot_every=3", "--extend=True") == 0
    assert [r["iter"] for r in lines(parts)] == list(range(41))


def test_a_worker_that_is_killed_costs_less_than_an_interval(tmp_path, text_file):
    keys = [*TINY, f"--data={text_file}", "--out_dir=out", "--max_iters=16", "--dropout=0.1"]
    keys += ["--snapshot_every=3", "--snapshot_storage=6", "--checkpoint_seconds=1e9"]
    output = killed_once.run(tmp_path, SCRIPT, "report.Report.stepped", 9, keys)
    assert "resuming out at iteration 6, training to 16" in output, output
    for losses in killed_once.repeated(tmp_path, start=6):
        assert len(losses) >= 1
        assert all(first == again for first, again in losses), losses
        assert len({first for first, _ in losses}) == len(losses)
    assert [r["iter"] for r in lines(tmp_path / "out")] == list(range(17))
    stored = {path.name.split(".")[0] for path in (tmp_path / "out/snapshots").glob("step-*")}
    assert stored - {"step-15"} in ({"step-6", "step-12"}, {"step-6"})  # 15, if 12 had to wait
    assert len(stored) == 2


def test_a_complete_run_stays_or_is_extended(tmp_path, text_file, capsys):
    out = tmp_path / "out"
    assert run(out, text_file, "--max_iters=4") == 0
    assert run(out, text_file, "--max_iters=4") == 0
    assert "is complete at iteration 4; --extend=True trains on" in capsys.readouterr().out
    assert lines(out)[-1]["iter"] == 4
    assert run(out, text_file, "--max_iters=4", "--extend=True") == 0
    assert "was complete at iteration 4: training on to 8" in capsys.readouterr().out
    assert [r["iter"] for r in lines(out)] == list(range(9))


def test_every_line_of_the_metrics_has_the_same_fields(tmp_path, text_file, capsys):
    out = tmp_path / "out"
    run(out, text_file, "--max_iters=12", "--log_interval=5")
    shown = capsys.readouterr().out
    assert " tokens/s\n" in shown
    assert "mfu" not in shown  # of which GPU?
    records = read_metrics(out / "metrics.jsonl")
    assert [r["iter"] for r in records] == [0, 5, 10, 12]
    fields = "iter loss lr ms tokens_per_second mfu tokens train_loss val_loss unigram_baseline"
    assert all(list(r) == fields.split() for r in records)
    assert all(r["mfu"] is None and r["ms"] > 0 and r["lr"] > 0 for r in records)
    assert all(r["tokens_per_second"] == pytest.approx(512e3 / r["ms"], rel=1e-3) for r in records)
    assert [r["val_loss"] is not None for r in records] == [True, False, True, True]
    # Once more over the end: nothing has been timed, and the line stands all the same.
    run(out, text_file, "--max_iters=12", "--log_interval=5")
    again = read_metrics(out / "metrics.jsonl")[-1]
    assert list(again) == fields.split()
    assert again == records[-1] | dict.fromkeys(CLOCK)


def test_two_runs_cannot_share_a_folder(tmp_path, text_file):
    with (
        checkpoint.claim(tmp_path / "out"),
        pytest.raises(UserError, match=r"another run is training in .*/out; wait for it"),
    ):
        run(tmp_path / "out", text_file)
    assert run(tmp_path / "out", text_file, "--max_iters=1") == 0


def test_mistakes_about_checkpoints(tmp_path, text_file):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--init_from=resume: there is no checkpoint in"):
        run(out, text_file, "--init_from=resume")
    assert run(out, text_file, "--max_iters=1") == 0
    with pytest.raises(UserError, match="has n_layer=2, not 3; use --init_from=scratch"):
        run(out, text_file, "--n_layer=3")
    text_file.write_text("0123456789" * 200)
    with pytest.raises(UserError, match="was trained on a text with other characters"):
        run(out, text_file, "--max_iters=2")
    assert run(out, text_file, "--max_iters=1", "--init_from=scratch") == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_learns(tmp_path, text_file, dtype):
    assert run(tmp_path / "out", text_file, "--max_iters=15", f"--dtype={dtype}") == 0
    records = lines(tmp_path / "out")
    assert records[-1]["val_loss"] < 0.9 * records[0]["val_loss"]


def test_micro_steps_must_divide(tmp_path, text_file):
    class Corpus:
        chars = "ab"

    settings = train.TrainSettings(gradient_accumulation_steps=4)
    with pytest.raises(UserError, match="=4 cannot be shared by 3 ranks: it must be a multiple"):
        Trainer(settings, Corpus, Ranks(0, 3, torch.device("cpu"), True))


def test_sample_script(tmp_path, text_file, capsys):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="no checkpoint in"):
        sample.main([f"--out_dir={out}"])
    run(out, text_file, "--max_iters=1", "--sample_tokens=0")
    assert not (out / "sample.txt").exists()
    capsys.readouterr()
    arguments = [f"--out_dir={out}", "--start=the q", "--max_new_tokens=40"]
    assert sample.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("the q")
    assert len(text) == len("the q") + 40 + len("\n---------------\n")
    sample.main(arguments)
    assert capsys.readouterr().out == text
    with pytest.raises(UserError, match="the model has never seen 'Z'"):
        sample.main([f"--out_dir={out}", "--start=Zoo"])
    (tmp_path / "start.txt").write_text("the lazy")
    sample.main([f"--out_dir={out}", f"--start=FILE:{tmp_path / 'start.txt'}"])
    assert capsys.readouterr().out.startswith("the lazy")


def run_ranks(folder: Path, launcher: str, number: int, arguments: list[str]) -> str:
    """What train.py printed on so many ranks."""
    command = [*ranks(number, launcher, forked=number > 2), SCRIPT, *arguments]
    ((status, output),) = finish(launch(command, folder), deadline=180)
    assert status == 0, output
    return output


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("libddp.run", 2), ("torch.distributed.run", 2), ("libddp.run", 4)],
    ids=["libddp-2", "torchrun-2", "libddp-4"],
)
def test_ranks_train_on_the_same_global_batch(tmp_path, text_file, launcher, number):
    several, one = tmp_path / "several", tmp_path / "one"
    shared = ["--max_iters=20", "--gradient_accumulation_steps=4"]
    output = run_ranks(
        tmp_path, launcher, number, [*TINY, *shared, f"--data={text_file}", f"--out_dir={several}"]
    )
    assert output.count("done: val loss") == 1
    assert (several / "sample.txt").exists()
    run(one, text_file, *shared)
    assert [r["iter"] for r in lines(several)] == list(range(21))
    # Rank 0's own loss is over its part of the batch; the evaluation is over the same text.
    for a, b in zip(lines(several), lines(one), strict=True):
        assert json.dumps(a["lr"]) == json.dumps(b["lr"])
        assert a["tokens"] == b["tokens"]
        if a["val_loss"] is not None:
            assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-3)
