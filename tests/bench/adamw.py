"""What synchronising the gradients and updating the parameters costs on two ranks.

    python tests/bench/adamw.py [--case gpt|tiny|both] [--rounds 16] [--steps 5]

12 blocks with the 12 parameters of a GPT block each, which compute nothing: their backward hands
out gradients that lie ready. "gpt": width 192, 5.3 M parameters; "tiny": width 8, 10 k parameters
in 144 tensors. The candidates take turns in blocks inside one pair of processes (see pairing.py),
one thread per rank, gradients set to None in each step. One JSON line per candidate, times per
step. `share_*_ms`: the step above the one that neither synchronises nor updates; `speedup_*`: that
of torch's DDP over Gloo with torch's fused AdamW, by this one's.
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))

import gpt
import pairing
import ranks
import torch
import torch.distributed as dist
from ddp_step import keep_freed_memory
from torch import nn

WIDTHS = {"gpt": 192, "tiny": 8}


class HandOut(torch.autograd.Function):
    """Passes `x` on; the gradients of `parameters` are copies of `gradients`."""

    @staticmethod
    def forward(ctx, x, gradients, *parameters):
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None, *torch._foreach_mul(ctx.gradients, 1.0)


class Layer(nn.Module):
    """The parameters of a GPT block."""

    def __init__(self, width: int):
        super().__init__()
        like = list(gpt.Block(width, 4).parameters())
        self.weights = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in like)
        self.gradients = [torch.randn_like(p) for p in like]

    def forward(self, x):
        return HandOut.apply(x, self.gradients, *self.weights)


class Stack(nn.Module):
    """12 of them."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(12)))

    def forward(self, x):
        return self.layers(x).sum()


def block_of_steps(model, make_optimizer, steps: int):
    """A callable that trains for `steps` steps and waits for the other rank at their end."""
    optimizer = make_optimizer(model)
    x = torch.ones(1, requires_grad=True)

    def run():
        for _ in range(steps):
            model.zero_grad()
            model(x).backward()
            if optimizer is not None:
                optimizer.step()
        dist.barrier()

    return run


def full_shard(model):
    from libddp.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy)


def by_layer(fully_shard, **arguments):
    """A wrapper for a unit per layer."""

    def wrap(model):
        for layer in model.layers:
            fully_shard(layer, **arguments)
        return fully_shard(model, **arguments)

    return wrap


def candidates_of(width: int, steps: int) -> dict:
    from libddp.distributed.fsdp import fully_shard
    from libddp.nn.parallel import DistributedDataParallel
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from libddp.optim import AdamW

    mesh = dist.DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    plain = by_layer(fully_shard, use_dtensor=False)
    gloo = mesh.get_group()

    def over_gloo(model):
        return nn.parallel.DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=True
        )

    def fused(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def one_by_one(model):
        return torch.optim.AdamW(model.parameters(), lr=3e-4)

    def ours(model):
        return AdamW(model.parameters(), lr=3e-4)

    def zero_1(model):
        return AdamW(model.parameters(), lr=3e-4, shard_over=model)

    def zero_2(model):
        return AdamW(model.parameters(), lr=3e-4, shard_over=model, shard_gradients=True)

    candidates = {
        "torch DDP, torch fused": (over_gloo, fused),
        "neither": (lambda model: model, lambda model: None),
        "alone, torch fused": (lambda model: model, fused),
        "libddp DDP, torch fused": (DistributedDataParallel, fused),
        "libddp DDP, libddp": (DistributedDataParallel, ours),
        "libddp DDP, libddp, shard_over": (DistributedDataParallel, zero_1),
        "libddp DDP, libddp, shard_gradients": (DistributedDataParallel, zero_2),
        "libddp FULL_SHARD, libddp": (full_shard, ours),
        "libddp fully_shard, libddp": (by_layer(fully_shard), ours),
        "libddp fully_shard, torch fused": (by_layer(fully_shard), fused),
        "libddp fully_shard, torch": (by_layer(fully_shard), one_by_one),
        "libddp fully_shard plain, libddp": (plain, ours),
        "libddp fully_shard plain, torch fused": (plain, fused),
        "libddp fully_shard plain, torch": (plain, one_by_one),
        "torch FSDP2, torch fused": (by_layer(torch_fully_shard, mesh=mesh), fused),
        "torch FSDP2, torch": (by_layer(torch_fully_shard, mesh=mesh), one_by_one),
    }
    return {
        name: block_of_steps(wrap(Stack(width)), make, steps)
        for name, (wrap, make) in candidates.items()
    }


def measure(case: str, options: argparse.Namespace) -> list[dict]:
    """On each rank; rank 0's numbers are reported."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.set_num_threads(1)
    steps = options.steps * (1 if case == "gpt" else 10)
    lines = pairing.compare(
        candidates_of(WIDTHS[case], steps),
        rounds=options.rounds,
        over_ranks=pairing.summed,
        case=f"{case}, 2 ranks",
    )
    dist.destroy_process_group()
    return pairing.per(lines, steps)


def report(lines: list[dict]) -> None:
    base = next(line for line in lines if line["candidate"] == "neither")
    for line in lines:
        for key in pairing.TIMES:
            share, torchs = line[key] - base[key], lines[0][key] - base[key]
            line[f"share_{key.removesuffix('_s')}_ms"] = share * 1e3
            line[f"speedup_{key.removesuffix('_s')}"] = torchs / share if share > 0 else 0.0
        pairing.emit(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*WIDTHS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    for case in WIDTHS if options.case == "both" else [options.case]:
        report(ranks.run(measure, 2, case, options, deadline=550)[0])


if __name__ == "__main__":
    main()
