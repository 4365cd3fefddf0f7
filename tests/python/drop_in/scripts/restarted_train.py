"""The way of elastic trainers: one rank fails, the launcher starts all again, and they resume.

With the argument "whole" nothing fails.
"""

import os
import sys
from pathlib import Path

import results
import tiny_gpt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, SAVES_EVERY, FAILS_AT = 12, 3, 7
FILE = Path(os.environ["RESULTS"], "ckpt.pt")


def batch(data, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(data) - 17, (4,), generator=generator)
    rows = torch.stack([data[s : s + 17] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def resume(model, optimizer):
    """(first step, losses so far)."""
    if not FILE.exists():
        return 0, []
    state = torch.load(FILE, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][dist.get_rank()])
    return state["step"], state["losses"][dist.get_rank()]


def save(model, optimizer, step, losses):
    mine = (torch.get_rng_state(), losses)
    all_of = [None] * dist.get_world_size()
    dist.all_gather_object(all_of, mine)
    if dist.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "rng": [rng for rng, _ in all_of],
            "losses": [found for _, found in all_of],
        }
        torch.save(state, FILE.with_suffix(".new"))
        FILE.with_suffix(".new").rename(FILE)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(100 * attempt + rank)  # a resumed run begins with other numbers
    bare = tiny_gpt.GPT()
    optimizer = bare.configure_optimizers(1e-2)
    model = DDP(bare)
    first, losses = resume(model, optimizer)
    assert (first > 0) == (attempt > 0)
    data = tiny_gpt.text()
    for step in range(first, STEPS):
        if step == FAILS_AT and rank == 1 and attempt == 0 and "whole" not in sys.argv:
            os._exit(3)
        loss = model(*batch(data, step, rank))[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % SAVES_EVERY == 0:
            save(model, optimizer, step + 1, losses)
    results.write(losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
