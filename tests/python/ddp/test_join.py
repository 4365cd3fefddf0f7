"""Uneven inputs: `join` gives torch's numbers on two ranks, and every rank the same model."""

import contextlib

import checks
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import Mlp, gloo, libddp_ddp
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def num_batches() -> int:
    return 3 + 2 * dist.get_rank()


def train(ddp_class, make_model=Mlp, accumulate=False, ddp=None, **join):
    """The model after an uneven number of steps; rank r has 3 + 2 r batches."""
    torch.manual_seed(5)
    group = {"process_group": gloo()} if ddp_class is TorchDDP else {}
    model = ddp_class(make_model(), **group, **(ddp or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with model.join(**join):
        for batch in range(num_batches()):
            data = torch.randn(8, 16, generator=generator)
            model.require_backward_grad_sync = not accumulate or batch % 2 == 0
            model(data).pow(2).mean().backward()
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
    return model.module.state_dict()


def compare(*arguments, **options):
    ours = train(libddp_ddp(), *arguments, **options)
    for value in ours.values():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value)
    theirs = train(TorchDDP, *arguments, **options)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def with_buffers():
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8))


def check_plain():
    compare()


def trained_on(ddp_class, contexts):
    """Steps in join contexts and outside of them; BatchNorm's statistics are this rank's own."""
    torch.manual_seed(5)
    group = {"process_group": gloo()} if ddp_class is TorchDDP else {}
    model = ddp_class(with_buffers(), **group)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    found = []
    for enable in contexts:
        with contextlib.nullcontext() if enable is None else model.join(enable=enable):
            for _ in range(num_batches() if enable else 2):
                model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
                found.append(model.module[1].running_mean.clone())
        model.zero_grad()
    return found


def check_buffers_behind_a_join():
    for contexts in ([True, None, False, None], [None, True, None, True, None]):
        ours, theirs = trained_on(libddp_ddp(), contexts), trained_on(TorchDDP, contexts)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def check_average_over_ranks_with_data():
    compare(divide_by_initial_world_size=False)


def check_many_buckets_and_unused_parameters():
    compare(ddp={"bucket_cap_mb": 0.002})
    compare(ddp={"find_unused_parameters": True})


def check_buffers():
    compare(with_buffers)


def check_a_rank_without_any_data():
    model = libddp_ddp()(Mlp())
    with model.join():
        for _ in range(4 * dist.get_rank()):
            model(torch.ones(2, 16)).sum().backward()
    # And the same model goes on with even inputs.
    model.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def check_evaluation_of_one_rank_stays_local():
    model = libddp_ddp()(with_buffers())
    with model.join():
        for _ in range(num_batches()):
            model(torch.randn(4, 16)).sum().backward()
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model(torch.randn(4, 16))
    assert not model._join_config.enable


def check_accumulation():
    train(libddp_ddp(), accumulate=True)


def check_torchs_zero_is_as_without():
    """A rank without data steps its part by the others' averages; torch's has its own last ones."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = []
    for is_shared in (False, True):
        torch.manual_seed(5)
        model = libddp_ddp()(Mlp())
        if is_shared:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        with Join([model, optimizer] if is_shared else [model]):
            for _ in range(num_batches()):
                optimizer.zero_grad()
                model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
                optimizer.step()
        trained.append(list(model.parameters()))
    for plain, shared in zip(*trained, strict=True):
        assert torch.equal(plain, shared)


def check_disabled():
    model = libddp_ddp()(Mlp())
    with model.join(enable=False):
        model(torch.ones(2, 16)).sum().backward()


def check_a_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = libddp_ddp()(Mlp())
    model.register_comm_hook(None, allreduce_hook)
    with model.join():
        for _ in range(num_batches()):
            model(torch.ones(2, 16)).sum().backward()


def check_early_termination():
    model = libddp_ddp()(Mlp())
    text = "exhausted all inputs" if dist.get_rank() == 0 else "at least one rank that exhausted"
    with pytest.raises(RuntimeError, match=text), model.join(throw_on_early_termination=True):  # noqa: PT012
        for _ in range(num_batches()):
            model(torch.ones(2, 16)).sum().backward()


results, test_on_every_rank = checks.suite(globals(), 2)


def four_ranks() -> list[torch.Tensor]:
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    return list(train(libddp_ddp()).values())


def test_four_ranks_end_with_the_same_model():
    first, *others = ranks.run(four_ranks, 4)
    for other in others:
        assert all(map(torch.equal, first, other))
