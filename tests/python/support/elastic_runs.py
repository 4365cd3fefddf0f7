"""Epochs that several ranks go through, as many and as far as a test says, in one process."""

from libddp.elastic.dataloader import ElasticDataLoader
from libddp.elastic.sampler import ElasticDistributedSampler
from torch.utils.data.distributed import DistributedSampler


def samplers(size, num_ranks, state=None, **options):
    """One for each rank, behind the same state."""
    made = [
        ElasticDistributedSampler(range(size), num_replicas=num_ranks, rank=rank, **options)
        for rank in range(num_ranks)
    ]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(state)
    return made


def torchs(size, num_ranks, epoch=0, **options):
    """Indices of each rank by torch's sampler, of a whole epoch."""
    found = []
    for rank in range(num_ranks):
        sampler = DistributedSampler(range(size), num_replicas=num_ranks, rank=rank, **options)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def loaders(size, num_ranks, batch_size, state=None, loader=None, **options):
    return [
        ElasticDataLoader(range(size), batch_size, sampler=sampler, **(loader or {}))
        for sampler in samplers(size, num_ranks, state, **options)
    ]


def walk(loaders, num_batches=None):
    """Samples of each rank, over so many batches or to the end; and the state of each rank then."""
    seen = [[] for _ in loaders]
    states = []
    for rank, loader in enumerate(loaders):
        for number, batch in enumerate(loader, 1):
            seen[rank] += batch.tolist()
            if number == num_batches:
                break
        states.append(loader.state_dict())
    return seen, states


def flat(seen):
    return [sample for samples in seen for sample in samples]
