"""Whole runs of train_fsdp.py: curves, checkpoints on another number of ranks, signals."""

import json
import os
import shutil
import signal
from pathlib import Path

import killed_once
import pytest
import ranks
import torch
from gpt2_runs import TINY, curve, example, lines, train
from launches import finish, launch
from launches import ranks as launcher

#: Other numbers of ranks add gradients in another order: float32 after ten iterations.
TOLERANCE = {"rel": 1e-4}


def close(one: list[tuple], other: list[tuple]) -> bool:
    """The same iterations with the same losses, up to TOLERANCE."""
    if len(one) != len(other):
        return False
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return all(a == (b if b is None else pytest.approx(b, **TOLERANCE)) for a, b in pairs)


KINDS = ("sharded", "full")
VARIANTS = {
    "SHARD_GRAD_OP": ["--sharding_strategy=SHARD_GRAD_OP"],
    "NO_SHARD": ["--sharding_strategy=NO_SHARD"],
    "sync": ["--no_sync=False"],
    "recompute": ["--activation_checkpointing=Block"],
    "bf16": ["--mixed_precision=bf16"],
    "fp16": ["--mixed_precision=fp16"],
    "dropout": ["--dropout=0.2"],
    "dropout-recompute": ["--dropout=0.2", "--activation_checkpointing=Attention,FeedForward"],
}
SHORT = "--max_iters=4"


def two_ranks(data: Path, folder: Path) -> list[int]:
    """Everything that needs two ranks: an interpreter with torch takes long to start."""
    status = [train(data, folder / "whole", "--max_iters=10", "--tensorboard=True")]
    for kind in KINDS:
        status.append(train(data, folder / kind, "--max_iters=5", f"--checkpoint={kind}"))
        if os.environ["RANK"] == "0":
            for world in (1, 2, 3):
                shutil.copytree(folder / kind, folder / f"{kind}-{world}")
    status += resumed(data, folder, 2)
    for name, arguments in VARIANTS.items():
        status.append(train(data, folder / name, SHORT, *arguments))
    train(data, folder / "stopped", SHORT, "--dropout=0.2", stop_at=1)
    status.append(train(data, folder / "stopped", SHORT, "--dropout=0.2"))
    if os.environ["RANK"] == "0":
        shutil.copytree(folder / "sharded", folder / "only-0")
    with pytest.raises(example().shared.UserError, match=r"rank 0: 5, rank 1: -1"):
        train(data, folder / f"only-{os.environ['RANK']}")
    leave_group()
    return status


def resumed(data: Path, folder: Path, world: int) -> list[int]:
    return [train(data, folder / f"{kind}-{world}", "--max_iters=10") for kind in KINDS]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    statuses = ranks.run(two_ranks, 2, data, folder, deadline=300)
    assert not any(status for rank in statuses for status in rank)
    return folder


def test_a_run_learns_and_reports(runs, gpt2):
    records = lines(runs / "whole")
    assert [r["iter"] for r in records] == list(range(11))
    assert len({tuple(r) for r in records}) == 1, "all lines have the same fields"
    assert records[-1]["val_loss"] < 0.8 * records[0]["val_loss"]
    assert {"loss", "lr", "ms", "tokens_per_second", "memory_mib/0", "memory_mib/1"} <= set(
        records[3]
    )
    assert records[3]["tokens"] == 4 * 6 * 2 * 16
    assert list((runs / "whole" / "tensorboard").iterdir())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_resumed_run_continues_the_curve(runs, data, world):
    if world == 1:
        assert resumed(data, runs, 1) == [0, 0]
    elif world == 3:
        assert ranks.run(resumed, world, data, runs, world, deadline=300) == [[0, 0]] * world
    whole = curve(runs / "whole")
    for kind in KINDS:
        # Iteration 5 of the first part was its last: it was evaluated, not trained.
        continued = curve(runs / f"{kind}-{world}")
        assert close(continued, whole), (kind, continued, whole)
        if world == 2:
            assert continued == whole


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in lines(out)[:4]]


def test_settings_that_must_not_change_the_losses(runs):
    whole = losses(runs / "whole")
    for name in ("SHARD_GRAD_OP", "recompute"):
        assert losses(runs / name) == whole, name
    for name in ("NO_SHARD", "sync"):
        assert losses(runs / name) == pytest.approx(whole, **TOLERANCE), name
    for name in ("bf16", "fp16"):
        assert losses(runs / name) == pytest.approx(whole, rel=0.01), name


def test_dropout_is_drawn_per_iteration_and_drawn_again_in_recomputation(runs):
    assert losses(runs / "dropout") != losses(runs / "whole")
    assert losses(runs / "dropout-recompute") == losses(runs / "dropout")
    assert losses(runs / "stopped") == losses(runs / "dropout")


def four_ranks(data: Path, folder: Path) -> list[int]:
    """HYBRID_SHARD on two hosts of two ranks, as the launcher would have placed them."""
    more = ["--gradient_accumulation_steps=4", "--sharding_strategy=HYBRID_SHARD"]
    status = [train(data, folder / "whole", "--max_iters=6", *more)]
    status.append(train(data, folder / "hybrid", "--max_iters=3", *more))
    if os.environ["RANK"] == "0":
        shutil.copytree(folder / "hybrid", folder / "full")
        shutil.copytree(folder / "hybrid", folder / "alone")
    status.append(train(data, folder / "hybrid", "--max_iters=6", *more))
    status.append(train(data, folder / "full", "--max_iters=6", more[0]))
    return status


def test_hybrid_sharding_resumes_otherwise(data, tmp_path):
    statuses = ranks.run(four_ranks, 4, data, tmp_path, env={"LOCAL_WORLD_SIZE": "2"}, deadline=300)
    assert not any(status for rank in statuses for status in rank)
    assert train(data, tmp_path / "alone", "--max_iters=6", "--gradient_accumulation_steps=4") == 0
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "hybrid") == whole
    for name in ("full", "alone"):
        assert close(curve(tmp_path / name), whole), name


def test_a_worker_that_is_killed_costs_less_than_an_interval(data, tmp_path, gpt2):
    script, keys = gpt2.folder / "train_fsdp.py", [*TINY, f"--data_dir={data}", "--out_dir=out"]
    keys += ["--max_iters=12", "--dropout=0.2", "--snapshot_every=3", "--snapshot_storage=6"]
    output = killed_once.run(tmp_path, script, "fsdp_trainer.FsdpTrainer.step", 9, keys)
    assert "resuming at iteration 6, to iteration 12" in output, output
    for losses in killed_once.repeated(tmp_path, start=6):
        assert len(losses) >= 1
        assert all(first == again for first, again in losses), losses
    assert [record["iter"] for record in lines(tmp_path / "out")] == list(range(13))
    stored = {path.name.split(".")[0] for path in (tmp_path / "out/snapshots").glob("step-*")}
    assert "step-6" in stored


def test_snapshots_are_of_what_libddp_has_sharded(data, tmp_path, gpt2):
    with pytest.raises(gpt2.shared.UserError, match=r"--snapshot_every: .* with --engine=torch"):
        train(data, tmp_path, "--engine=torch", "--snapshot_every=1")


def test_a_signal_saves_and_stops(data, tmp_path, capsys):
    assert train(data, tmp_path, "--max_iters=10", stop_at=3) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM at iteration 4 of 10; saved" in capsys.readouterr().out
    assert (tmp_path / "checkpoints" / "latest").read_text() == "iter_00000004\n"


def test_old_checkpoints_go_and_the_newest_is_whole(data, tmp_path):
    more = ["--max_iters=4", "--save_interval=1", "--keep_checkpoints=2", "--eval_iters=1"]
    assert train(data, tmp_path, *more) == 0
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["iter_00000003", "iter_00000004", "latest"]
    run = json.loads((tmp_path / "checkpoints" / "iter_00000004" / "run.json").read_text())
    assert run["order"] == {"samples": 4 * 12, "seed": 1337}
    # A run that starts anew gives up the later checkpoints of the one before.
    assert train(data, tmp_path, *more[1:], "--max_iters=3", "--init_from=scratch") == 0
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["iter_00000002", "iter_00000003", "latest"]


def test_mistakes_about_checkpoints(data, tmp_path, gpt2):
    UserError = gpt2.shared.UserError
    with pytest.raises(UserError, match="--init_from=resume: there is no checkpoint in"):
        train(data, tmp_path, "--init_from=resume")
    leave_group()
    assert train(data, tmp_path, "--max_iters=1") == 0
    latest = tmp_path / "checkpoints" / "latest"
    latest.write_text("iter_7")
    with pytest.raises(UserError, match=r"names 'iter_7', .* not there; there are: iter_00000001"):
        train(data, tmp_path)
    leave_group()
    latest.write_text("iter_00000001")
    with pytest.raises(UserError, match=r"has n_head=2, not 4; use --init_from=scratch"):
        train(data, tmp_path, "--n_head=4")
    leave_group()
    with pytest.raises(UserError, match=r"--seed=7: the checkpoint's data order has seed 1337"):
        train(data, tmp_path, "--max_iters=2", "--seed=7")
    leave_group()
    path = tmp_path / "checkpoints" / "iter_00000001"
    for part in path.glob("*.distcp"):
        part.unlink()
    with pytest.raises(UserError, match=r"cannot read .*iter_00000001: .*No such file"):
        train(data, tmp_path, "--max_iters=2")
    leave_group()


def leave_group() -> None:
    torch.distributed.destroy_process_group()


def test_under_the_launcher_with_pretrained_weights(data, tmp_path, gpt2):
    """export.py of a first run is what a second one starts from."""
    pytest.importorskip("safetensors")
    first, script = tmp_path / "first", gpt2.folder / "train_fsdp.py"
    assert train(data, first, "--max_iters=4") == 0
    assert gpt2.export.main([f"--out_dir={first}", f"--to={tmp_path / 'gpt2'}"]) == 0
    arguments = [a for a in TINY if not a.startswith(("--n_", "--eval_iters"))]
    more = ["--data_dir", data, "--out_dir=second", "--hf_model=gpt2", "--max_iters=2"]
    command = [*launcher(2), script, *arguments, *more, "--eval_iters=5"]
    ((status, output),) = finish(launch(command, tmp_path), deadline=300)
    assert status == 0, output
    assert "0.03 M parameters, gpt2 weights, fp32" in output
    before, after = lines(first)[-1]["val_loss"], lines(tmp_path / "second")[0]["val_loss"]
    assert after == pytest.approx(before, **TOLERANCE)


def test_the_order_deals_every_window_once_an_epoch(gpt2):
    block, tokens = 8, 1000
    order = gpt2.tokens.Order(tokens, block, seed=3)
    count = (tokens - block) // block
    first, second = order.take(count), order.take(count)
    for starts in (first, second):
        assert len(set(starts // block)) == count
        assert starts.min() >= 0
        assert starts.max() + block + 1 <= tokens
    assert (first != second).any()
    again = gpt2.tokens.Order(tokens, block, seed=3)
    again.restore({"samples": count + 5, "seed": 3})
    assert (again.take(4) == second[5:9]).all()
