"""DeepSpeed ZeRO on CPU over libddp's backend: losses equal to Gloo's, to the bit."""

import importlib.util
import os
import sys

import pytest
import ranks
import torch
import torch.distributed as dist

from libddp import distributed as ddp_dist

STEPS = 6


def train(backend: str, stage: int):
    os.environ["DS_ACCELERATOR"] = "cpu"
    (ddp_dist if backend == "libddp" else dist).init_process_group(backend)
    import deepspeed

    # Its shared-memory all-reduce would be compiled here, and would take the backend's place.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )[0]
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randn(4, 16, generator=data)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
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
