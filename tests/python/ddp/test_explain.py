"""What a wrapped model tells about itself: explain() and timings()."""

import itertools

import checks
import ddp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn


class SumOfAll(nn.Module):
    """Parameters of two dtypes, of several buckets, and one that does not train."""

    def __init__(self):
        super().__init__()
        for index in range(4):
            setattr(self, f"full{index}", nn.Parameter(torch.ones(10, 13)))
            setattr(self, f"half{index}", nn.Parameter(torch.ones(7, dtype=torch.bfloat16)))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self):
        return sum(parameter.float().sum() for parameter in self.parameters())


def wrap(module, **arguments):
    return models.libddp_ddp()(module, **arguments)


def step(model):
    model(torch.ones(2, 16) * (dist.get_rank() + 1)).sum().backward()


def assert_names_and_bytes(explained, module):
    wanted = {n: p for n, p in module.named_parameters() if p.requires_grad}
    names = [name for bucket in explained.buckets for name in bucket.parameters]
    assert sorted(names) == sorted(wanted)
    for index, bucket in enumerate(explained.buckets):
        assert bucket.index == index
        assert bucket.gradient_bytes == sum(wanted[name].nbytes for name in bucket.parameters)
        assert bucket.total_bytes > bucket.gradient_bytes
        assert {wanted[name].dtype for name in bucket.parameters} == {bucket.dtype}
        assert bucket.in_arena
    assert explained.num_parameters == len(wanted)
    assert explained.gradient_bytes == sum(p.nbytes for p in wanted.values())
    assert explained.arena_bytes == sum(b.total_bytes for b in explained.buckets)


def check_names_and_bytes_before_and_after_the_rebuild():
    module = SumOfAll()
    model = wrap(module, bucket_cap_mb=0.001)
    explained = model.explain()
    assert not explained.rebuilt
    assert len(explained.buckets) > 2
    assert_names_and_bytes(explained, module)
    for _ in range(2):  # the second forward rebuilds
        model().backward()
    explained = model.explain()
    assert explained.rebuilt
    assert_names_and_bytes(explained, module)


def check_an_order_that_was_right_needs_no_rebuild():
    model = wrap(nn.Linear(16, 1))
    assert not model.explain().rebuilt
    for _ in range(2):
        step(model)
    assert model.explain().rebuilt


def check_totals_options_and_table():
    model = wrap(models.Mlp(), bucket_cap_mb=0.001, find_unused_parameters=True)
    explained = model.explain()
    assert (explained.rank, explained.world_size) == (dist.get_rank(), dist.get_world_size())
    assert explained.options["find_unused_parameters"] is True
    assert explained.options["bucket_bytes_cap"] == 1048
    text = str(explained)
    assert f"rank {dist.get_rank()} of {dist.get_world_size()}: 8 parameters" in text
    assert "(reverse order of the parameters)" in text
    assert "layers.3.bias" in text
    assert "float32" in text
    assert "arena" in text
    assert len(text.splitlines()) == 4 + len(explained.buckets)
    with pytest.raises(AttributeError):
        explained.rank = 5


def check_sparse_gradients_have_no_bucket():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 16, sparse=True)
            self.layer = nn.Linear(16, 1)

        def forward(self, tokens):
            return self.layer(self.embedding(tokens))

    model = wrap(Sparse())
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
    explained = model.explain()
    assert explained.sparse == ("embedding.weight",)
    assert explained.num_parameters == 3
    assert "without a bucket (sparse): embedding.weight" in str(explained)
    assert [len(bucket.parameters) for bucket in explained.buckets] == [2]
    for one in model.timings():
        assert_ordered(one)


def assert_ordered(one):
    if one.forward_begin_ns is not None:
        assert one.forward_begin_ns <= one.forward_end_ns <= one.backward_begin_ns
    assert one.backward_begin_ns <= one.backward_end_ns <= one.pass_end_ns
    for bucket in one.buckets:
        assert one.backward_begin_ns <= bucket.ready_ns <= bucket.launched_ns <= bucket.done_ns
        assert bucket.done_ns <= one.pass_end_ns
    spans = one.communication()
    assert all(begin <= end for begin, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def check_times_of_each_bucket():
    model = wrap(models.Mlp(), bucket_cap_mb=0.001)
    assert model.timings() == []
    for _ in range(5):
        step(model)
    with model.no_sync():
        step(model)
    passes = model.timings()
    assert [one.number for one in passes] == [1, 2, 3, 4, 5]
    for one in passes:
        assert one.forward_begin_ns is not None
        assert_ordered(one)
    explained = model.explain()
    assert [b.parameters for b in passes[-1].buckets] == [b.parameters for b in explained.buckets]
    assert [b.bytes for b in passes[-1].buckets] == [b.total_bytes for b in explained.buckets]


def check_the_last_32_passes_are_kept():
    model = wrap(models.Mlp())
    for _ in range(40):
        step(model)
    assert [one.number for one in model.timings()] == list(range(9, 41))


def check_times_with_a_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = wrap(models.Mlp(), bucket_cap_mb=0.001)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(3):
        step(model)
    for one in model.timings():
        # As in torch, one bucket until the order of the gradients is known.
        assert len(one.buckets) == 1 if one.number == 1 else len(one.buckets) > 2
        assert_ordered(one)


def check_times_with_unused_parameters():
    model = wrap(models.Heads(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    for head in range(3):
        model(torch.ones(2, 4), head).sum().backward()
    assert len(model.timings()) == 3
    for one in model.timings():
        assert_ordered(one)


def check_times_of_a_rank_without_data():
    model = wrap(models.Mlp())
    with model.join():
        for _ in range(1 + dist.get_rank()):
            step(model)
    passes = model.timings()
    assert len(passes) == dist.get_world_size()
    for one in passes:
        assert_ordered(one)
    assert (passes[-1].forward_begin_ns is None) is (dist.get_rank() + 1 < dist.get_world_size())


results, test_on_two_ranks = checks.suite(globals(), 2, backend="gloo")
