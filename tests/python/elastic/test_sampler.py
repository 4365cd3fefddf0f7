"""ElasticDistributedSampler: no sample twice or never, whatever the cuts and numbers of ranks."""

import itertools
import random

import elastic_runs as runs
import pytest
import torch
from libddp.elastic.sampler import ElasticDistributedSampler
from torch.utils.data import DataLoader

import libddp

SIZES = (0, 1, 2, 7, 24, 61)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"seed": 5}])
def test_uncut_epochs_are_torchs(options):
    for size, num_ranks, epoch in itertools.product(SIZES, (1, 2, 3, 4, 9), (0, 3)):
        ours = runs.samplers(size, num_ranks, **options)
        for sampler in ours:
            sampler.set_epoch(epoch)
        assert [list(s) for s in ours] == runs.torchs(size, num_ranks, epoch, **options)
        assert {len(s) for s in ours} == {len(list(ours[0]))}


@pytest.mark.parametrize("drop_last", [False, True])
def test_same_ranks_go_on_as_if_never_cut(drop_last):
    for size, num_ranks, batch_size in itertools.product((7, 24, 61), (1, 2, 3, 4), (1, 4)):
        whole = runs.torchs(size, num_ranks, drop_last=drop_last)
        for cut in range(-(-len(whole[0]) // batch_size) + 1):
            taken = [rank[: cut * batch_size] for rank in whole]
            state = {"epoch": 0, "completed_num": min(size, num_ranks * len(taken[0]))}
            ours = runs.samplers(size, num_ranks, state, drop_last=drop_last)
            assert [a + list(b) for a, b in zip(taken, ours, strict=True)] == whole


def test_every_sample_once_over_changes_of_ranks():
    """Torch's padding, at the very end, is all that may come twice."""
    generator = random.Random(3)
    for trial in range(300):
        size, batch_size = generator.randrange(1, 120), generator.randrange(1, 6)
        seen, state = [], None
        for num_ranks in generator.choices((1, 2, 3, 4), k=generator.randrange(1, 7)):
            part = runs.loaders(size, num_ranks, batch_size, state, seed=trial)
            taken, states = runs.walk(part, generator.randrange(1, 5))
            assert all(other == states[0] for other in states)
            seen, state = seen + runs.flat(taken), states[0]
        last = generator.randrange(1, 5)
        rest, states = runs.walk(runs.loaders(size, last, batch_size, state, seed=trial))
        seen += runs.flat(rest)
        assert set(seen) == set(range(size))
        assert len(seen) < size + 4
        assert states[0]["completed_num"] == size


def test_with_drop_last_none_comes_twice():
    generator = random.Random(4)
    for _ in range(100):
        size, seen, state = generator.randrange(8, 120), [], None
        ranks = generator.choices((1, 2, 3, 4), k=3)
        for num_ranks in ranks:
            part = runs.loaders(size, num_ranks, 2, state, drop_last=True)
            taken, [state, *_] = runs.walk(part, 2)
            seen += runs.flat(taken)
        rest, _ = runs.walk(runs.loaders(size, 3, 2, state, drop_last=True))
        seen += runs.flat(rest)
        assert len(set(seen)) == len(seen)
        assert size - len(seen) < 4


def test_a_position_is_of_one_pass_through_its_epoch():
    sampler = ElasticDistributedSampler(range(10), 1, 0, shuffle=False)
    sampler.load_state_dict({"epoch": 2, "completed_num": 6})
    assert (sampler.epoch, len(sampler), sampler.total_size) == (2, 4, 4)
    assert next(iter(sampler)) == 6  # a look at one
    assert list(sampler) == [6, 7, 8, 9]
    assert list(sampler) == list(range(10))
    sampler.load_state_dict({"epoch": 2, "completed_num": 6})
    sampler.set_epoch(3)
    assert len(sampler) == 10
    assert list(sampler) == list(range(10))
    sampler.set_epoch(2)
    assert len(sampler) == 4


def test_what_is_done_is_an_empty_pass():
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    sampler.load_state_dict({"epoch": 0, "completed_num": 10})
    assert len(sampler) == 0
    assert list(sampler) == []
    assert len(list(sampler)) == 5


def test_begin_needs_no_counting():
    sampler = ElasticDistributedSampler(range(10), 2, 0)
    assert sampler.state_dict()["completed_num"] == 0
    assert sampler.state_dict(0, 4)["completed_num"] == 0
    sampler.load_state_dict({"epoch": 1, "completed_num": 4})
    assert sampler.state_dict()["completed_num"] == 4
    sampler.set_epoch(2)
    assert sampler.state_dict()["completed_num"] == 0
    sampler.load_state_dict({})
    assert sampler.state_dict()["epoch"] == 0


def plain(size, num_ranks, batch_size, state=None, **loader):
    """torch's DataLoader of rank 0, its sampler, and an iterator."""
    [sampler, *_] = runs.samplers(size, num_ranks, state, shuffle=False)
    return sampler, iter(DataLoader(range(size), batch_size, sampler=sampler, **loader))


def take(iterator, num_batches):
    for _ in range(num_batches):
        next(iterator)


def test_torchs_loader_and_a_count_of_the_epochs_batches():
    sampler, batches = plain(100, 2, 4)
    take(batches, 3)
    state = sampler.state_dict(3, 4)
    assert state["completed_num"] == 24
    assert sampler.state_dict(2, 4)["completed_num"] == 16  # the third is not done yet
    sampler, batches = plain(100, 2, 4, state)
    assert sampler.state_dict(3, 4)["completed_num"] == 24  # nothing new
    take(batches, 2)
    assert sampler.state_dict(2, 4)["completed_num"] == 24 + 16  # counted from the load


def test_a_count_that_goes_on_over_a_change_of_ranks():
    sampler, batches = plain(200, 4, 4)
    take(batches, 5)
    state = sampler.state_dict(5, 4)
    sampler, batches = plain(200, 2, 4, state)
    take(batches, 1)
    assert sampler.state_dict(6, 4)["completed_num"] == 5 * 16 + 8
    take(batches, 6)
    # It may be either by itself, and is what it was before.
    assert sampler.state_dict(7, 4)["completed_num"] == 5 * 16 + 2 * 8


def test_a_count_that_fits_in_two_ways_is_an_error():
    sampler, batches = plain(200, 2, 4)
    take(batches, 2)
    sampler, batches = plain(200, 2, 4, sampler.state_dict(2, 4))
    take(batches, 6)
    with pytest.raises(libddp.ArgumentError, match=r"3 steps may count .* loaded 2.*ElasticData"):
        sampler.state_dict(3, 4)


def test_workers_are_ahead_and_the_count_is_not():
    sampler, batches = plain(100, 2, 4, num_workers=1, prefetch_factor=3)
    take(batches, 2)
    assert sampler._iteration.num_drawn > 8
    assert sampler.state_dict(2, 4)["completed_num"] == 16


def test_a_count_over_epochs_is_an_error():
    sampler, batches = plain(20, 1, 4)
    assert len(list(batches)) == 5
    sampler.set_epoch(1)
    assert sampler.state_dict(5, 4)["completed_num"] == 0
    take(iter(DataLoader(range(20), 4, sampler=sampler)), 1)
    with pytest.raises(libddp.ArgumentError, match=r"epoch 1: 6 steps of 4 .*drawn of it: 1 bat"):
        sampler.state_dict(6, 4)


def test_steps_of_a_sampler_that_nobody_reads_are_an_error():
    with pytest.raises(libddp.ArgumentError, match="6 steps, and this sampler has handed out noth"):
        ElasticDistributedSampler(range(20), 1, 0).state_dict(6, 4)


def test_torchs_loader_without_a_count_is_an_error():
    sampler, batches = plain(100, 2, 4)
    take(batches, 3)
    with pytest.raises(libddp.StateError, match="knows what a DataLoader drew, not what the scri"):
        sampler.state_dict()


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"dataset_size": 11}, "dataset_size is 11 in the state and 10 here"),
        ({"seed": 1}, "seed is 1 in the state and 0 here"),
        ({"shuffle": False}, "shuffle is False in the state and True here"),
        ({"completed_num": 11}, "completed_num is 11 and the dataset has 10"),
        ({"completed_num": -1}, "completed_num is -1. Hint: pass a whole number, 0 or more"),
        ({"completed_num": "x"}, "completed_num is 'x'"),
        ({"epoch": 0.5}, "epoch is 0.5"),
    ],
)
def test_states_of_other_data_are_errors_and_change_nothing(other, text):
    sampler = ElasticDistributedSampler(range(10), 1, 0)
    sampler.load_state_dict({"epoch": 3, "completed_num": 4})
    before = sampler.state_dict()
    with pytest.raises(libddp.ArgumentError, match=text):
        sampler.load_state_dict({**before, **other})
    assert sampler.state_dict() == before


@pytest.mark.parametrize("count", [(-1, 4), (1.5, 4), (1, 0), (float("inf"), 4), (1, "4.5")])
def test_bad_counts_are_errors(count):
    sampler, batches = plain(100, 2, 4)
    take(batches, 3)
    with pytest.raises(ValueError, match=r"(iter_step|micro_batch_size) is .* Hint: pass a whole"):
        sampler.state_dict(*count)


def test_the_seed_of_an_order_without_shuffle_does_not_matter():
    [sampler] = runs.samplers(10, 1, shuffle=False, seed=1)
    sampler.load_state_dict({**sampler.state_dict(), "seed": 2})


def test_alone_without_a_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert sorted(ElasticDistributedSampler(range(5))) == list(range(5))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(ElasticDistributedSampler(range(5), num_replicas=1)) == 5
    with pytest.raises(libddp.StateError, match="WORLD_SIZE is 2: each rank would read all"):
        ElasticDistributedSampler(range(5))
    with pytest.raises(libddp.ArgumentError, match="num_replicas is 2, and neither rank nor"):
        ElasticDistributedSampler(range(5), num_replicas=2)
    with pytest.raises(ValueError, match="Invalid rank 2"):
        ElasticDistributedSampler(range(5), num_replicas=2, rank=2)


def test_orders_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert sorted(ElasticDistributedSampler(range(5), 1, 0)) == list(range(5))


def test_importing_libddp_does_not_load_it():
    import subprocess
    import sys

    code = "import libddp, sys; assert 'libddp.elastic' not in sys.modules; libddp.elastic.sampler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
