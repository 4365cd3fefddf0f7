"""A communication hook gets torch's buckets: what it computes may hang on what lies together."""

import itertools

import checks
import torch
import torch.distributed as dist
from ddp_models import gloo, libddp_ddp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

PASSES = 4
SMALL = 0.002  # MiB, about 2,000 bytes
CASES = {
    "default": {},
    "cap": {"bucket_cap_mb": SMALL},
    "cap that is torch's default": {"bucket_cap_mb": 25},
    "list": {"bucket_cap_mb_list": [SMALL / 2, SMALL, 2 * SMALL]},
    "static": {"static_graph": True, "bucket_cap_mb": SMALL},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": SMALL},
    "unused, default": {"find_unused_parameters": True},
    "unused, list": {"find_unused_parameters": True, "bucket_cap_mb_list": [SMALL, 2 * SMALL]},
}


class Model(nn.Module):
    """Parameters in another order than they run in; `wide`: beyond torch's first bucket."""

    def __init__(self, wide=False, half=None):
        super().__init__()
        sizes = [16, 600 if wide else 24, 700 if wide else 9, 30, 16]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.sometimes = nn.Linear(16, 40)
        self.first = nn.Linear(16, 16)
        self.layers[2].to(half or torch.float32)

    def forward(self, x, with_all):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)).float())
        # Gradients of full rank: PowerSGD makes NaN of others where rounding leaves a zero.
        return x + self.sometimes(x).square().mean() if with_all else x


def train(ddp_class, register, model, options):
    """What the hook has seen, and the parameters; rank 0 skips a layer where that is allowed."""
    group = {"process_group": gloo()} if ddp_class is TorchDDP else {}
    ddp = ddp_class(model, **group, **options)
    register(ddp, group.get("process_group"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(PASSES):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        skips = options.get("find_unused_parameters", False) and (step + dist.get_rank()) % 2 == 0
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator), not skips).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def build(**arguments):
    torch.manual_seed(5)
    return Model(**arguments)


def seen_by(ddp_class, model, options):
    """(index, is_last, elements, names) of each bucket in the order of the calls."""
    names = {id(p): name for name, p in model.named_parameters()}
    seen = []

    def register(ddp, group):
        def average(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            members = [names[id(p)] for p in bucket.parameters()]
            place = (bucket.index(), bucket.is_last())
            if options.get("static_graph"):
                place = ()  # torch calls each bucket of the first pass number 0
            seen.append((*place, bucket.buffer().numel(), members))
            work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        ddp.register_comm_hook(None, average)

    return seen, train(ddp_class, register, model, options)


def check_buckets():
    for case, options in CASES.items():
        for arguments in ({}, {"wide": True}, {"half": torch.float64}):
            ours, values = seen_by(libddp_ddp(), build(**arguments), options)
            theirs, wanted = seen_by(TorchDDP, build(**arguments), options)
            assert ours == theirs, (case, arguments)
            assert all(map(torch.equal, values, wanted)), (case, arguments)


def one_after_the_other(hook):
    """Over Gloo torch mixes up the messages of two buckets whose hooks make several."""

    def waits(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return waits


def power_sgd(ddp, group):
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    ddp.register_comm_hook(state, one_after_the_other(powerSGD_hook.powerSGD_hook))


def quantization(ddp, group):
    hook = one_after_the_other(quantization_hooks.quantization_perchannel_hook)
    ddp.register_comm_hook(group or dist.group.WORLD, hook)


def check_hooks_whose_numbers_hang_on_the_buckets():
    # torch 2.11's quantisation hooks fail under its own DDP, too.
    registers = (power_sgd, quantization) if torch.__version__ >= (2, 15) else (power_sgd,)
    for register in registers:
        for case, options in CASES.items():
            ours = train(libddp_ddp(), register, build(), options)
            theirs = train(TorchDDP, register, build(), options)
            assert all(bool(p.isfinite().all()) for p in theirs), (register.__name__, case)
            assert all(map(torch.equal, ours, theirs)), (register.__name__, case)


def check_explain_tells_the_order():
    model = build()
    ddp = libddp_ddp()(model, bucket_cap_mb=SMALL)
    ddp.register_comm_hook(None, one_after_the_other(lambda *_: None))
    (bucket,) = ddp.explain().buckets
    assert list(bucket.parameters) == [name for name, _ in model.named_parameters()]
    assert not ddp.explain().rebuilt
    assert "(order of the parameters)" in str(ddp.explain())


results, test_on_all_ranks = checks.suite(globals(), 2)
