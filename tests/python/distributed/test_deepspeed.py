"""DeepSpeed ZeRO on CPU over libddp's backend: losses equal to Gloo's, to the bit."""

import importlib.util
import os

import pytest
import ranks
import torch
import torch.distributed as dist
import zero_engine

from libddp import distributed as ddp_dist

STEPS = 6


def train(backend: str, stage: int):
    os.environ["DS_ACCELERATOR"] = "cpu"
    (ddp_dist if backend == "libddp" else dist).init_process_group(backend)
    engine = zero_engine.make(stage)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = [zero_engine.step(engine, draws) for _ in range(STEPS)]
    dist.destroy_process_group()
    return losses


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed (pip install deepspeed); ZeRO was not tried",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_gives_gloos_losses(stage):
    ours = ranks.run(train, 2, "libddp", stage)
    assert ours == ranks.run(train, 2, "gloo", stage)
    assert all(losses[-1] < losses[0] for losses in ours)
