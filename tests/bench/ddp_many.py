"""A step with 10,000 parameters on two ranks, against no synchronisation plus the copy.

    python tests/bench/ddp_many.py [rounds]

Each parameter has 256 float32 elements (10 MiB in all). "no sync + copy" is the bare model whose
gradients are copied into one flat buffer after backward, which any reducer has to do; libddp and
torch's DDP (gradients as bucket views; also with find_unused_parameters) average them over the
ranks besides. One thread per rank; a round ends with a barrier. JSON lines; `ratio_to_copy` is wall
time over that of "no sync + copy".
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

PARAMETERS, NUMEL = 10_000, 256


class Many(nn.Module):
    """A sum of products; autograd has two nodes per parameter."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(PARAMETERS))

    def forward(self, x):
        return torch.stack([x * weight for weight in self.weights]).sum()


def step_of(model, after=lambda: None):
    x = torch.randn(NUMEL)

    def run():
        model.zero_grad()
        model(x).backward()
        after()
        dist.barrier()

    return run


def copying_step():
    model = Many()
    flat = torch.zeros(PARAMETERS, NUMEL)
    views = list(flat.unbind())

    def copy():
        torch._foreach_copy_(views, [weight.grad for weight in model.weights])

    return step_of(model, copy)


def measure(rounds: int) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("libddp")
    gloo = dist.new_group(backend="gloo")
    torch.set_num_threads(1)

    def torch_step(**options):
        return step_of(
            nn.parallel.DistributedDataParallel(
                Many(), process_group=gloo, gradient_as_bucket_view=True, **options
            )
        )

    candidates = {
        "no sync + copy": copying_step(),
        "no sync": step_of(Many()),
        "libddp": step_of(DistributedDataParallel(Many())),
        "libddp find_unused": step_of(DistributedDataParallel(Many(), find_unused_parameters=True)),
        "torch": torch_step(),
        "torch find_unused": torch_step(find_unused_parameters=True),
    }
    lines = pairing.compare(candidates, rounds=rounds, case="10,000 parameters, 2 ranks")
    dist.destroy_process_group()
    return lines


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    lines = ranks.run(measure, 2, rounds, deadline=550)[0]
    for line in lines:
        for key in ("min", "median"):
            line[f"ratio_to_copy_{key}"] = line[key] / lines[0][key]
        pairing.emit(line)


if __name__ == "__main__":
    main()
