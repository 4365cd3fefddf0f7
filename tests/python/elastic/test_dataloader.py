"""ElasticDataLoader: positions are what the script received; batch sizes that change."""

import json
import warnings
from itertools import islice

import elastic_runs as runs
import pytest
import torch
from libddp.elastic.dataloader import ElasticDataLoader
from libddp.elastic.sampler import ElasticDistributedSampler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import libddp

WORKERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True},
    {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True},
]


def one(size, batch_size, num_ranks=1, state=None, options=None, **loader):
    """The loader of rank 0."""
    return runs.loaders(size, num_ranks, batch_size, state, loader, **(options or {}))[0]


@pytest.fixture(autouse=True)
def no_accelerator():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no acc")
        yield


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_prefetched_batches_are_not_in_the_position(workers):
    loader = one(61, 4, num_ranks=2, **workers)
    seen = []
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        assert loader.state_dict()["completed_num"] == min(number * 8, 61)
        if number == 5:
            state = loader.state_dict()
    assert seen == runs.torchs(61, 2)[0]
    loader.load_state_dict(state)
    assert len(loader) == 3
    assert runs.flat([batch.tolist() for batch in loader]) == seen[20:]
    assert len(loader) == 8
    assert runs.flat([batch.tolist() for batch in loader]) == seen


@pytest.mark.parametrize("workers", WORKERS[1:3], ids=str)
def test_workers_and_changes_of_ranks(workers):
    seen, state = [], None
    for num_ranks, num_batches in ((2, 3), (3, 2), (1, 4), (4, 1), (2, None)):
        part = runs.loaders(97, num_ranks, 4, state, loader=workers)
        taken, states = runs.walk(part, num_batches)
        assert all(other == states[0] for other in states)
        seen, state = seen + runs.flat(taken), states[0]
    assert set(seen) == set(range(97))
    assert len(seen) == 98


def test_counters_of_scripts_do_not_matter():
    """Over epochs and over changes of ranks, as in DLRover's examples: mnist, nanogpt."""
    loader = one(40, 4, num_ranks=2)
    steps = 0
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for number, _ in enumerate(loader, 1):
            steps += 1
            state = loader.sampler.state_dict(steps, loader.batch_size)
            assert (state["completed_num"], state["epoch"]) == (number * 8, epoch)
            if steps == 12:
                break
    loader = one(40, 4, num_ranks=1, state=state)
    for number, _ in enumerate(loader, 1):
        steps += 1
        state = loader.sampler.state_dict(steps, loader.batch_size)
        assert (state["completed_num"], state["epoch"]) == (16 + number * 4, 2)
    assert number == 6


@pytest.mark.parametrize("workers", WORKERS[:2], ids=str)
def test_the_batch_in_hand_may_not_be_done(workers):
    loader = one(40, 4, **workers)
    for step, _ in enumerate(loader):  # saved before it trains on the batch
        state = loader.sampler.state_dict(step, 4)
        assert state["completed_num"] == step * 4
        if step == 3:
            break
    loader.load_state_dict(state)
    for step, _ in enumerate(loader, 3):
        state = loader.sampler.state_dict(step, 4)
        assert state["completed_num"] == step * 4


def test_a_look_at_a_batch_moves_nothing():
    loader = one(40, 4)
    whole = [batch.tolist() for batch in loader]
    for number, batch in enumerate(loader, 1):
        assert batch.tolist() == whole[number - 1]
        if number == 2:
            next(iter(loader))
        else:
            assert loader.state_dict()["completed_num"] == 4 * number
    loader.load_state_dict({"epoch": 0, "completed_num": 12})
    next(iter(loader))
    assert [batch.tolist() for batch in loader] == whole[3:]


def test_a_state_is_at_once_the_loaders():
    loader = one(40, 4)
    for number, _ in enumerate(loader):
        if number == 5:
            break
    loader.load_state_dict({"epoch": 0, "completed_num": 8})
    assert loader.state_dict()["completed_num"] == 8


def test_the_end_of_an_epoch_and_the_next():
    loader = one(10, 4, drop_last=True)
    assert len(list(loader)) == 2
    done = loader.state_dict()
    assert done["completed_num"] == 10  # the loader dropped two
    assert list(one(10, 4, state=done)) == []
    loader.sampler.set_epoch(1)
    assert loader.state_dict()["completed_num"] == 0
    for _ in loader:
        break
    state = loader.state_dict()
    assert (state["completed_num"], state["epoch"]) == (4, 1)


def test_samples_without_batches():
    loader = one(10, None)
    batches = iter(loader)
    taken = [next(batches), next(batches), next(batches)]
    state = loader.state_dict()
    assert state["completed_num"] == 3
    rest = list(one(10, None, state=state))
    assert sorted(int(sample) for sample in [*taken, *rest]) == list(range(10))
    with pytest.raises(libddp.ArgumentError, match="batches are not its own"):
        loader.set_batch_size(3)


def test_states_are_plain_numbers_and_the_samplers():
    loader = one(10, 4)
    for _ in loader:
        break
    state = json.loads(json.dumps(loader.state_dict()))
    loader = one(10, 4)
    loader.sampler.load_state_dict(state)
    assert sum(len(batch) for batch in loader) == 6


def test_dropout_repeats_the_lost_steps():
    def train(loader, num_batches):
        batches = islice(loader, num_batches)
        return [torch.nn.functional.dropout(batch.float(), 0.5) for batch in batches]

    for workers in WORKERS[:2]:
        torch.manual_seed(3)
        loader = one(40, 4, **workers)
        batches = iter(loader)
        train(batches, 3)
        state, numbers = loader.state_dict(), torch.get_rng_state()
        lost = train(batches, 7)
        torch.manual_seed(4)  # of another process
        loader = one(40, 4, state=state, **workers)
        torch.set_rng_state(numbers)
        again = train(loader, 7)
        assert len(lost) == len(again) == 7
        assert all(torch.equal(a, b) for a, b in zip(lost, again, strict=True))


def test_a_new_epoch_draws_as_torchs_loader_does():
    after = []
    for kind in (DataLoader, ElasticDataLoader):
        torch.manual_seed(3)
        list(kind(range(8), 4, sampler=ElasticDistributedSampler(range(8), 1, 0)))
        after.append(torch.get_rng_state())
    assert torch.equal(*after)
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    state = {"epoch": 0, "completed_num": 4}
    list(one(8, 2, state=state, generator=generator))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_that_changes_amid_an_epoch(drop_last):
    loader = one(40, 4, num_ranks=2, drop_last=drop_last)
    sizes, places = [], []
    for number, batch in enumerate(loader, 1):
        sizes.append(len(batch))
        places.append(loader.state_dict()["completed_num"])
        loader.update_batch_size([3, 6, 8][min(number, 3) - 1])
    assert sizes == ([4, 3, 6] if drop_last else [4, 3, 6, 7])
    assert places == ([8, 14, 26] if drop_last else [8, 14, 26, 40])
    assert loader.batch_size == loader.get_batch_size() == loader.batch_sampler.batch_size == 8


def test_a_batch_size_that_changes_behind_workers():
    loader = one(60, 4, num_workers=1, prefetch_factor=2)
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        loader.set_batch_size(5)
        assert loader.state_dict()["completed_num"] == sum(sizes)
    assert sizes[:2] == [4, 4]  # they were in work
    assert sizes[3:-1] == [5] * len(sizes[3:-1])
    assert sum(sizes) == 60


@pytest.mark.parametrize("text", ['{"dataloader": {"batch_size": 3}}', '{"batch_size": 3}'])
def test_a_batch_size_from_a_file(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    loader = ElasticDataLoader(range(12), batch_size=4, config_file=str(file))
    assert [len(batch) for batch in loader] == [3, 3, 3, 3]
    file.write_text('{"dataloader": {"batch_size": 6, "version": 1}}')
    loader.update_batch_size()
    assert [len(batch) for batch in loader] == [6, 6]
    file.write_text('{"dataloader": {"batch_size": 0}}')
    loader.load_config()
    loader.load_config(file)
    assert loader.get_batch_size() == 6
    assert file.read_text() == '{"dataloader": {"batch_size": 0}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json' cannot be read: .*No such file"),
        ("{", "cannot be read: Expecting"),
        ("[]", "cannot be read: .*Hint: it is JSON"),
        ('{"dataloader": 1}', "cannot be read"),
        ('{"batch_size": -1}', "batch_size is -1. Hint: pass a positive"),
        ('{"batch_size": "8"}', "batch_size is '8'"),
        ('{"batch_size": true}', "batch_size is True"),
    ],
)
def test_files_without_a_usable_size_are_errors(tmp_path, text, message):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(libddp.ArgumentError, match=message):
        ElasticDataLoader(range(12), batch_size=4, config_file=file)


def test_without_a_file_nothing_is_read():
    loader = ElasticDataLoader(range(12), 4)
    loader.update_batch_size()
    assert loader.batch_size == 4
    with pytest.raises(libddp.ArgumentError, match="load_config: there is no file"):
        loader.load_config()


def test_other_samplers_work_and_have_no_position():
    loader = ElasticDataLoader(range(6), 4, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(libddp.StateError, match="this loader draws by SequentialSampler"):
        loader.state_dict()
    with pytest.raises(libddp.StateError, match="only an ElasticDistributedSampler has a pos"):
        loader.load_state_dict({})
    batches = BatchSampler(SequentialSampler(range(6)), 2, False)
    loader = ElasticDataLoader(range(6), batch_sampler=batches)
    assert loader.batch_sampler is batches
    with pytest.raises(libddp.StateError, match="this loader draws by BatchSampler"):
        loader.state_dict()
    with pytest.raises(libddp.ArgumentError, match="batches are not its own"):
        loader.set_batch_size(3)


def test_iterable_datasets_work():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(6))

    assert [b.tolist() for b in ElasticDataLoader(Numbers(), 4)] == [[0, 1, 2, 3], [4, 5]]


def test_batches_out_of_order_are_an_error():
    with pytest.raises(libddp.ArgumentError, match=r"in_order=False .* has no position"):
        one(10, 4, num_workers=1, in_order=False)
    assert len(one(10, 4, in_order=False)) == 3  # nobody can be late


def test_the_iterator_is_torchs_in_what_scripts_ask_of_it():
    batches = iter(one(10, 4, num_workers=1))
    assert iter(batches) is batches
    assert len(batches) == 3
    assert batches._num_workers == 1
    with pytest.raises(AttributeError):
        _ = batches.nothing_of_that_name
