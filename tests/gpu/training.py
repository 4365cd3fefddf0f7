"""A small GPT and the loops that the tests of parity train it with.

    losses = train(DDP(build()), steps=20)

Losses are equal to the bit where two ways add in one order, because every kernel in here does: the
plain attention, deterministic backward passes, no TF32.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # ranks start without it

from gpt import LENGTH, VOCABULARY, Block, Gpt
from subject import DEVICE
from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS = 20
BATCH = 8


def build(dropout: float = 0.0, seed: int = 17, device=DEVICE) -> Gpt:
    """The same values every time."""
    torch.manual_seed(seed)
    model = Gpt(layers=3, width=64, heads=4)
    if dropout:
        for block in model.blocks:
            block.mlp.append(torch.nn.Dropout(dropout))
    return model.to(device)


def batches(steps: int):
    draw = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw).to(DEVICE)


@contextlib.contextmanager
def exact():
    """Kernels that add in the same order every time."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    fill, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def train(
    model,
    steps: int = STEPS,
    *,
    scaler=None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    clip=None,
    optimizer=None,
) -> list[float]:
    """Losses of each step. `accumulate` micro-steps, all but the last under no_sync."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = functools.partial(
        torch.autocast, DEVICE.type, dtype=autocast, enabled=autocast is not None
    )
    losses = []
    with exact():
        for tokens in batches(steps):
            optimizer.zero_grad()
            for number, part in enumerate(tokens.chunk(accumulate), 1):
                waits = number < accumulate and hasattr(model, "no_sync")
                with model.no_sync() if waits else contextlib.nullcontext():
                    with amp():
                        loss = model(part) / accumulate
                    (scaler.scale(loss) if scaler else loss).backward()
            if clip:
                if scaler:
                    scaler.unscale_(optimizer)
                clip(model)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


def policy():
    """Every block is a unit of FSDP."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return ModuleWrapPolicy({Block})


def close(found: list[float], wanted: list[float], tolerance: float) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=tolerance
    )
