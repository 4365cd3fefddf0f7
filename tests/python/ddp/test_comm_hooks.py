"""Communication hooks: torch's own run unchanged and give torch's numbers on two ranks."""

import copy
import re

import checks
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import Mlp, gloo, libddp_ddp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 6


def train(ddp_class, register, **options):
    """Parameters and losses after a few steps; every rank has data of its own."""
    torch.manual_seed(5)
    group = {"process_group": gloo()} if ddp_class is TorchDDP else {}
    model = ddp_class(Mlp(), bucket_cap_mb=0.002, **group, **options)
    register(model, group.get("process_group"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    data = torch.randn(8, 16, generator=generator)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(data) - data).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.detach().clone() for p in model.parameters()], losses


def assert_ranks_agree(parameters):
    for parameter in parameters:
        first = parameter.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter)


def compare(register, **options):
    ours, losses = train(libddp_ddp(), register, **options)
    assert_ranks_agree(ours)
    assert losses[-1] < losses[0]
    theirs, their_losses = train(TorchDDP, register, **options)
    assert losses == their_losses
    assert all(map(torch.equal, ours, theirs))


def check_torchs_allreduce_hook():
    compare(lambda model, group: model.register_comm_hook(group, default_hooks.allreduce_hook))


class WithComplex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.inner = Mlp()

    def forward(self, value):
        return (self.inner(value) * self.turn).abs()


def check_complex_gradients():
    """The future of their all-reduce has pairs of reals, in torch too."""
    found = []
    for wrap, options in ((libddp_ddp(), {}), (TorchDDP, {"process_group": gloo()})):
        torch.manual_seed(5)
        model = wrap(WithComplex(), **options)
        model.register_comm_hook(options.get("process_group"), default_hooks.allreduce_hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, 16), 1.0 + dist.get_rank())).sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, found[0] + found[1], found[2] + found[3]))


def check_torchs_fp16_hook_and_wrapper():
    compare(lambda model, group: model.register_comm_hook(group, default_hooks.fp16_compress_hook))
    wrapper = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    compare(lambda model, group: model.register_comm_hook(group, wrapper))


def check_torchs_bf16_hook_runs_without_nccl():
    _, losses = train(
        libddp_ddp(),
        lambda model, group: model.register_comm_hook(group, default_hooks.bf16_compress_hook),
    )
    assert losses[-1] < losses[0]


def check_builtin_hooks():
    kinds = dist.BuiltinCommHookType
    compare(lambda model, group: model._register_builtin_comm_hook(kinds.ALLREDUCE))

    def fp16(model, group):
        model._register_builtin_comm_hook(kinds.FP16_COMPRESS)

    # torch halves in fp16 before the sum, libddp in fp32 after it: subnormal halves differ.
    ours, _ = train(libddp_ddp(), fp16)
    assert_ranks_agree(ours)
    for a, b in zip(ours, train(TorchDDP, fp16)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def check_compression_in_cpp():
    for dtype in (torch.float16, torch.bfloat16):
        parameters, losses = train(
            libddp_ddp(), lambda model, group, dtype=dtype: model.compress_gradients(dtype)
        )
        assert_ranks_agree(parameters)
        assert losses[-1] < losses[0]
    compressed = libddp_ddp()(Mlp())
    compressed.compress_gradients(torch.float16)
    assert "(reverse order of the parameters)" in str(compressed.explain())
    with pytest.raises(ValueError, match="cannot be compressed to Double"):
        libddp_ddp()(Mlp()).compress_gradients(torch.float64)


def check_power_sgd():
    def register(model, group):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    parameters, losses = train(libddp_ddp(), register)
    assert_ranks_agree(parameters)
    assert losses[-1] < losses[0]


def check_a_hook_sees_each_bucket_once_in_order():
    seen = []

    def hook(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes = [p.shape for p in bucket.parameters()]
        assert [g.shape for g in bucket.gradients()] == shapes
        seen.append((bucket.index(), bucket.is_last()))
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), state["value"]))
        return future

    model = libddp_ddp()(Mlp(), bucket_cap_mb=0.002)
    model.register_comm_hook({"value": 3.0}, hook)
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, 16)).sum().backward()
        assert [index for index, _ in seen] == list(range(len(seen)))
        assert [is_last for _, is_last in seen] == [False] * (len(seen) - 1) + [True]
        assert all((p.grad == 3).all() for p in model.parameters())
        model.zero_grad()


class Swapped(torch.nn.Module):
    """Used in the other order than registered."""

    def __init__(self):
        super().__init__()
        self.last, self.first = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.first(x))


def check_the_order_in_buckets_stays_where_parameters_may_be_unused():
    """As with torch: what a hook sends may meet a replica that is in its first pass (torchft)."""
    for stays in (True, False):
        torch.manual_seed(0)
        seen = []

        def hook(_, bucket, seen=seen):
            seen.append(bucket.buffer().clone())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = libddp_ddp()(Swapped(), find_unused_parameters=stays)
        model.register_comm_hook(None, hook)
        for _ in range(3):
            model.zero_grad()
            model(torch.arange(6.0).view(2, 3)).sum().backward()
        assert all(torch.equal(seen[0], each) for each in seen) == stays


def check_a_hook_sees_gradients_and_nothing_else():
    """What it makes of all of them (a mean, the largest ones) is torch's, then."""

    def scaled_sign(state, bucket):
        group, seen = state
        gradients = bucket.buffer()
        assert gradients.numel() == sum(each.numel() for each in bucket.gradients())
        seen.append(gradients.numel())
        signs = gradients.abs().mean() * gradients.sign() / dist.get_world_size()
        work = dist.all_reduce(signs, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    found = []
    for ddp_class, group in ((TorchDDP, gloo()), (libddp_ddp(), None)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 5))
        model, seen = ddp_class(net, process_group=group), []
        model.register_comm_hook((group, seen), scaled_sign)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 3) * (dist.get_rank() + 1)).sum().backward()
        assert seen == [14] * 3
        found.append([p.grad.clone() for p in net.parameters()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def check_a_copy_keeps_the_hook():
    model = libddp_ddp()(Mlp())
    model.register_comm_hook(None, answer_seven)
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 16)).sum().backward()
    assert all((p.grad == 7).all() for p in twin.parameters())
    compressed = libddp_ddp()(Mlp())
    compressed.compress_gradients(torch.float16)
    with pytest.raises(RuntimeError, match="can only be called once"):
        copy.deepcopy(compressed).register_comm_hook(None, answer_seven)


def answer_seven(state, bucket):
    future = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), 7.0))
    return future


def check_unused_parameters_are_found_beside_a_hook():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if dist.get_rank() == 0 else self.b(self.a(x))

    model = libddp_ddp()(Branches(), find_unused_parameters=True)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model = libddp_ddp()(Branches())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match=r"'b.weight' \(rank 0\)"):
        model(torch.ones(2, 4)).sum().backward()


def check_registration_has_rules():
    model = libddp_ddp()(Mlp())
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)
    with pytest.raises(ValueError, match="no parameter named 'bucket'"):
        model.register_comm_hook(None, lambda state, x: None)

    def annotated(state, bucket: int):
        return None

    with pytest.raises(ValueError, match=r"annotation should be dist\.GradBucket"):
        model.register_comm_hook(None, annotated)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    late = libddp_ddp()(Mlp())
    late(torch.ones(2, 16)).sum().backward()
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        late.register_comm_hook(None, default_hooks.allreduce_hook)


results, test_on_every_rank = checks.suite(globals(), 2)


def failing_hook(kind: str) -> str:
    """On rank 1 the hook fails; the error that this rank gets."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    model = libddp_ddp()(Mlp())

    def hook(state, bucket):
        if dist.get_rank() == 1 and kind == "raises":
            raise KeyError("a mistake in the hook")
        if dist.get_rank() == 1 and kind == "shape":
            future = torch.futures.Future()
            future.set_result(torch.zeros(3))
            return future
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    with pytest.raises(Exception) as caught:
        model(torch.ones(2, 16)).sum().backward()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("raises", "KeyError: 'a mistake in the hook'"),
        ("shape", "it returned 3 elements for bucket 0"),
    ],
)
def test_a_hook_that_fails_on_one_rank_fails_on_all(kind, own):
    other, failed = ranks.run(failing_hook, 2, kind)
    assert own in failed
    assert "rank 1" in other
    assert re.search("communication hook.* bucket 0", other)
