"""trainer.py: how samples are dealt out, mixed precision and clipping, seeds."""

import pytest
import torch
from mingpt_runs import config, mingpt, train

ONE = "trainer_config.max_epochs=1"


def loaders(text_file, rank: int, world: int) -> dict:
    made = config(f"data_config.path={text_file}")
    train_set, test_set = mingpt.char_dataset.load(made.data_config)
    shape = mingpt.model.GPTConfig(1, 1, 8, vocab_size=len(train_set.chars), block_size=16)
    trainer = mingpt.trainer.Trainer(
        made.trainer_config,
        made.optimizer_config,
        mingpt.model.GPT(shape),
        train_set,
        test_set,
        mingpt.ranks.Ranks(rank, world, torch.device("cpu"), distributed=False),
    )
    return trainer.loaders


def batches(loader, epoch: int) -> list[list[list[int]]]:
    loader.sampler.set_epoch(epoch)
    return [x.tolist() for x, _ in loader]


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_the_batches_of_one(text_file, name, world):
    alone = loaders(text_file, 0, 1)[name]
    shares = [loaders(text_file, rank, world)[name] for rank in range(world)]
    for epoch in (0, 1):
        whole = batches(alone, epoch)
        parts = [batches(share, epoch) for share in shares]
        assert {len(part) for part in parts} == {len(whole)}
        for step, batch in enumerate(whole):
            together = [sample for part in parts for sample in part[step]]
            assert sorted(together) == sorted(batch)
    assert batches(alone, 0) != batches(alone, 1)


def norms_of_a_run(monkeypatch, *arguments) -> tuple[list, list]:
    """Gradient norms before and after clipping, of the steps without an overflow."""
    before, after, original = [], [], torch.nn.utils.clip_grad_norm_

    def clip(parameters, limit):
        parameters = list(parameters)
        norm = original(parameters, limit)
        if norm.isfinite():
            before.append(norm.item())
            gradients = [p.grad for p in parameters]
            after.append(torch.nn.utils.get_total_norm(gradients).item())
        return norm

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        train(*arguments)
    return before, after


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scaling_does_not_change_what_is_clipped(tmp_path, text_file, monkeypatch, dtype):
    limit = ["trainer_config.grad_norm_clip=0.5", ONE]
    full, clipped = norms_of_a_run(monkeypatch, text_file, tmp_path / "full.pt", *limit)
    amp = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
    half, _ = norms_of_a_run(monkeypatch, text_file, tmp_path / "half.pt", *limit, *amp)
    assert max(full) > 0.5 >= max(clipped) - 1e-3
    assert len(half) > 0.8 * len(full)
    # The scale is 65536 at first: gradients that were still scaled would be that much larger.
    assert max(half) < 10 * max(full)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_learns_as_float32_does(tmp_path, text_file, dtype):
    full = train(text_file, tmp_path / "full.pt")
    amp = ["trainer_config.use_amp=true", f"trainer_config.amp_dtype={dtype}"]
    half = train(text_file, tmp_path / "half.pt", *amp)
    assert half[-1][1] == pytest.approx(full[-1][1], rel=0.1)


def test_loader_processes_change_nothing(tmp_path, text_file):
    one = train(text_file, tmp_path / "one.pt", ONE)
    assert train(text_file, tmp_path / "w.pt", ONE, "trainer_config.data_loader_workers=1") == one


def test_the_seed_decides(tmp_path, text_file):
    dropout = [ONE, "gpt_config.resid_pdrop=0.1"]
    one = train(text_file, tmp_path / "1.pt", *dropout)
    torch.manual_seed(99)  # the caller's random state does not matter
    assert train(text_file, tmp_path / "2.pt", *dropout) == one
    assert train(text_file, tmp_path / "3.pt", *dropout, "trainer_config.seed=2") != one
