"""DistributedDataParallel over groups that nobody has wrapped: Gloo's, and those in Python."""

import warnings

import checks
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import Mlp, drop_in_ddp, is_equal_on_all_ranks, libddp_ddp
from in_place_group import InPlace
from states import assert_same
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Answer(dist._Work):
    """The result stands in the future, not in the tensor that was given."""

    def __init__(self, value):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(value)

    def wait(self, timeout):
        return True

    def get_future(self):
        return self.future


class ByFuture(InPlace):
    def getBackendName(self):
        return "by-future"

    def allreduce(self, tensors, options):
        results = [tensor.clone() for tensor in tensors]
        self.inner.allreduce(results, options).wait()
        self.calls.append("allreduce")
        self.works = [*getattr(self, "works", []), Answer(results)]
        return self.works[-1]


def trained(ddp_class, group):
    torch.manual_seed(3 + dist.get_rank())
    model = ddp_class(Mlp(), process_group=group, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 16)).pow(2).mean().backward()
        optimizer.step()
    assert is_equal_on_all_ranks(model.module.layers[0].weight)
    return [p.detach() for p in model.parameters()]


def check_groups_in_python():
    for kind in (InPlace, ByFuture):
        group = kind(dist.group.WORLD)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = trained(libddp_ddp(), group)
        assert not [w for w in caught if "libddp" in str(w.message)]
        assert_same(weights, trained(TorchDDP, kind(dist.group.WORLD)))
        assert group.calls.count("allreduce") >= 3


def check_a_group_in_python_of_one_rank():
    """It may know more than this rank does about who is there: it is asked all the same."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    group = ByFuture(groups[dist.get_rank()])
    model = drop_in_ddp()(Mlp(), process_group=group)
    model(torch.randn(3, 16)).sum().backward()
    assert "allreduce" in group.calls
    assert model._get_ddp_logging_data()["world_size"] == 1
    assert model._distributed_rank == 0


def check_a_group_in_python_that_lacks_an_operation():
    class Lacking(InPlace):
        def allreduce(self, tensors, options):
            raise NotImplementedError("no sums here")

    model = libddp_ddp()(Mlp(), process_group=Lacking(dist.group.WORLD))
    with pytest.raises(RuntimeError, match="no sums here"):
        model(torch.randn(3, 16)).sum().backward()


def check_gloo_itself():
    """Taken as it is, with one word about it on rank 0."""
    for group in (None, dist.group.WORLD, dist.new_group()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = trained(libddp_ddp(), group)
        texts = [str(w.message) for w in caught if "backend 'gloo'" in str(w.message)]
        first = group is not dist.group.WORLD  # None was the same one
        assert len(texts) == (1 if first and dist.get_rank() == 0 else 0)
        assert_same(weights, trained(TorchDDP, group))


def check_what_is_no_group():
    from libddp.errors import ArgumentError

    with pytest.raises(ArgumentError, match="'x' is a str"):
        libddp_ddp()(Mlp(), process_group="x")


def begin():
    dist.init_process_group("gloo")


results, test_over_other_groups = checks.suite(globals(), 2, begin=begin)


def without_a_default_group():
    """As programs for fault tolerance use it: a group of their own, and no default group."""

    class Lonely(dist.ProcessGroup):
        def getBackendName(self):
            return "lonely"

        def allreduce(self, tensors, options):
            self.work = Answer(tensors)
            return self.work

    group = Lonely(0, 1)
    model = drop_in_ddp()(Mlp(), process_group=group)
    model(torch.ones(2, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model._get_ddp_logging_data()["rank"] == 0


def test_without_a_default_group():
    ranks.run(without_a_default_group, 1)
