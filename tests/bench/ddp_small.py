"""What the wrapper costs a tutorial-size model: 3 parameters, one rank and two.

    python tests/bench/ddp_small.py [rounds]

A linear layer and a scale, forward and backward, one thread per rank. On one rank nothing is
exchanged: `wrapper_us` is what the Python class, the hooks and the end of the pass cost above the
bare module. On two ranks the same figure holds the exchange of 1 KiB too. JSON lines per candidate;
bare module, libddp and torch's DDP take turns.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import pairing
import ranks
import torch
import torch.distributed as dist
from torch import nn

STEPS = 200


class Tiny(nn.Module):
    """Three parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 10)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return self.layer(x) * self.scale


def steps_of(model):
    x = torch.randn(8, 20)

    def run():
        for _ in range(STEPS):
            model.zero_grad()
            model(x).sum().backward()

    return run


def measure(rounds: int) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("libddp")
    gloo = dist.new_group(backend="gloo")
    torch.set_num_threads(1)
    torchs = nn.parallel.DistributedDataParallel
    candidates = {
        "bare": steps_of(Tiny()),
        "libddp": steps_of(DistributedDataParallel(Tiny())),
        "torch": steps_of(torchs(Tiny(), process_group=gloo)),
        "torch bucket view": steps_of(
            torchs(Tiny(), process_group=gloo, gradient_as_bucket_view=True)
        ),
    }
    case = f"3 parameters, {dist.get_world_size()} ranks"
    lines = pairing.compare(candidates, rounds=rounds, case=case)
    dist.destroy_process_group()
    return lines


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for world_size in (1, 2):
        lines = pairing.per(ranks.run(measure, world_size, rounds, deadline=300)[0], STEPS)
        for line in lines:
            for key in ("min", "median"):
                line[f"wrapper_{key}_us"] = (line[key] - lines[0][key]) * 1e6
            pairing.emit(line)


if __name__ == "__main__":
    main()
