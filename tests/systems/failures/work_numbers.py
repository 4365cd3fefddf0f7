"""Training in which one gradient of one rank becomes NaN."""

from __future__ import annotations

import time

import torch

from failures.work import join


def train_until_nan(me, victim: int, layer: int, bad_step: int) -> dict:
    """What each rank learns, in which step, and whether its gradients are still numbers."""
    from libddp.nn.parallel import DistributedDataParallel

    dist = join(me)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    step = 0

    def spoil(grad):
        if me.rank != victim or step != bad_step:
            return grad
        for rank in range(me.world_size):  # what is said of it may overtake the step before
            me.wait_for(f"begun-{rank}")
        (me.folder / "spoiled").write_text(str(time.monotonic()))
        grad = grad.clone()
        grad[3, 5] = float("nan")
        return grad

    layers[layer].weight.register_hook(spoil)

    def train():
        nonlocal step
        while True:
            step += 1
            if step == bad_step:
                me.mark("begun")
            model(torch.ones(4, 64)).sum().backward()

    learned = me.learn(train)
    dist.destroy_process_group()
    return learned | {"step": step}
