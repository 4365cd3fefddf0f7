"""A small model under DeepSpeed's ZeRO on CPUs, for ranks of ranks.run.

engine = zero_engine.make(stage=2)         # behind init_process_group
loss = zero_engine.step(engine, draws)
"""

import os
import sys

import torch


def make(stage: int):
    """What deepspeed.initialize returns; the same weights on all ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its shared-memory all-reduce would be compiled here, and would take the backend's place.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )[0]


def step(engine, draws: torch.Generator) -> float:
    """One step on a batch that `draws` makes; its loss."""
    loss = engine(torch.randn(4, 16, generator=draws)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()
