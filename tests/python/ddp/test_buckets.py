"""Arguments that shape the buckets: bucket_cap_mb, bucket_cap_mb_list, skipping unused ones."""

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import Heads, Mlp, libddp_ddp

LAYER_MB = (16 * 16 + 16) * 4 / 2**20


def step(model, *arguments):
    model.zero_grad()
    model(*arguments).pow(2).mean().backward()


def plan_after_rebuilding(model):
    for _ in range(2):
        step(model, torch.ones(2, 16))
    return [len(bucket) for bucket in model._replica.bucket_plan()]


def check_one_cap_for_all():
    model = libddp_ddp()(Mlp(8), bucket_cap_mb=2 * LAYER_MB)
    assert max(plan_after_rebuilding(model)) == 4


def check_a_cap_for_each_bucket():
    """The last entry holds for the rest; each layer has a weight and a bias."""
    model = libddp_ddp()(Mlp(8), bucket_cap_mb_list=[LAYER_MB, 3 * LAYER_MB, 2 * LAYER_MB])
    assert plan_after_rebuilding(model) == [2, 6, 4, 4]
    assert model.bucket_bytes_cap == int(3 * LAYER_MB * 2**20)


def check_caps_that_nothing_fits_in():
    """torch takes them, and sends each gradient by itself."""
    for options in ({"bucket_cap_mb": 0}, {"bucket_cap_mb": -1}, {"bucket_cap_mb_list": [-1]}):
        model = libddp_ddp()(Mlp(8), **options)
        assert plan_after_rebuilding(model) == [1] * 16


def heads(skip):
    torch.manual_seed(2)
    return libddp_ddp()(
        Heads(),
        find_unused_parameters=True,
        bucket_cap_mb=1e-5,
        skip_all_reduce_unused_params=skip,
    )


def check_skipping_gives_the_same_gradients():
    """One bucket per parameter, so those of two heads of three are not sent."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    skipping, sending = heads(True), heads(False)
    for head in (0, 0, 2):
        step(skipping, x, head)
        step(sending, x, head)
        for ours, theirs in zip(skipping.parameters(), sending.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def check_ranks_that_skip_differently_are_told():
    """Last: the group cannot go on after it."""
    model = heads(True)

    def steps():
        for _ in range(3):
            step(model, torch.ones(2, 4), dist.get_rank())

    with pytest.raises(RuntimeError, match="bucket"):
        steps()


def run_all():
    import datetime

    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp", timeout=datetime.timedelta(seconds=20))
    results = checks.run(globals())
    destroy_process_group()
    return results


results = checks.fixture(run_all, world_size=2)


@pytest.mark.parametrize("name", checks.names(globals()))
def test_buckets(results, name):
    checks.verify(results, name)
