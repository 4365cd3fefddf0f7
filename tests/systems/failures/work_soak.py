"""Collectives over several groups at once, each result checked, resources counted meanwhile."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import torch

from failures.work import join

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16)
SIZES = (1, 7, 64, 1000, 4096, 20_000, 200_000)
#: The large ones are rare, or they would be all that the time goes into.
WEIGHTS = (20, 20, 20, 20, 15, 4, 1)


class Mixture:
    """Random collectives of one group, the same on all of its ranks."""

    def __init__(self, dist, group, ranks: list[int], seed: int):
        self.dist, self.group, self.ranks = dist, group, ranks
        self.me = ranks.index(dist.get_rank())
        self.random = random.Random(seed)
        self.number = 0
        self.arena = dist.native(group).allocate([SIZES[-1]])

    def value(self, rank: int) -> int:
        """What a rank brings to this call: small, so that sums are exact in every dtype."""
        return (rank * 3 + self.number) % 11

    def tensor(self, dtype, count: int, value: int):
        use_arena = dtype == torch.float32 and self.random.random() < 0.3
        tensor = self.arena[:count] if use_arena else torch.empty(count, dtype=dtype)
        return tensor.fill_(value)

    def run(self, count: int) -> None:
        kinds = (
            self.all_reduce, self.all_reduce, self.all_reduce_async, self.all_gather,
            self.reduce_scatter, self.broadcast, self.barrier, self.all_to_all, self.ring,
        )  # fmt: skip
        for _ in range(count):
            self.number += 1
            kind = self.random.choice(kinds)
            dtype = self.random.choice(DTYPES)
            size = self.random.choices(SIZES, WEIGHTS)[0]
            kind(dtype, size)

    def expect(self, tensor, value: int) -> None:
        if not bool(tensor.eq(value).all()):
            raise AssertionError(f"call {self.number} of {self.ranks}: not {value}: {tensor}")

    def total(self) -> int:
        return sum(self.value(rank) for rank in range(len(self.ranks)))

    def all_reduce(self, dtype, count) -> None:
        tensor = self.tensor(dtype, count, self.value(self.me))
        if self.random.random() < 0.5:
            self.dist.all_reduce(tensor, group=self.group)
            return self.expect(tensor, self.total())
        self.dist.all_reduce(tensor, self.dist.ReduceOp.MAX, group=self.group)
        self.expect(tensor, max(self.value(rank) for rank in range(len(self.ranks))))

    def all_reduce_async(self, dtype, count) -> None:
        tensors = [torch.full((count,), self.value(self.me), dtype=dtype) for _ in range(3)]
        works = [self.dist.all_reduce(t, group=self.group, async_op=True) for t in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            self.expect(tensor, self.total())

    def all_gather(self, dtype, count) -> None:
        world = len(self.ranks)
        output = torch.empty(world * count, dtype=dtype)
        own = self.tensor(dtype, count, self.value(self.me))
        self.dist.all_gather_into_tensor(output, own, group=self.group)
        for rank, block in enumerate(output.chunk(world)):
            self.expect(block, self.value(rank))

    def reduce_scatter(self, dtype, count) -> None:
        world = len(self.ranks)
        output = torch.empty(count, dtype=dtype)
        value = self.value(self.me)
        blocks = torch.full((world, count), value, dtype=dtype)
        blocks += torch.arange(world, dtype=dtype).unsqueeze(1)
        self.dist.reduce_scatter_tensor(output, blocks.view(-1), group=self.group)
        self.expect(output, self.total() + world * self.me)

    def broadcast(self, dtype, count) -> None:
        root = self.random.randrange(len(self.ranks))
        tensor = self.tensor(dtype, count, self.value(self.me))
        self.dist.broadcast(tensor, src=self.ranks[root], group=self.group)
        self.expect(tensor, self.value(root))

    def barrier(self, dtype, count) -> None:
        self.dist.barrier(group=self.group)

    def all_to_all(self, dtype, count) -> None:
        world = len(self.ranks)
        output = torch.empty(world * count, dtype=dtype)
        blocks = torch.full((world, count), self.value(self.me), dtype=dtype)
        blocks += torch.arange(world, dtype=dtype).unsqueeze(1)
        self.dist.all_to_all_single(output, blocks.view(-1), group=self.group)
        for rank, block in enumerate(output.chunk(world)):
            self.expect(block, self.value(rank) + self.me)

    def ring(self, dtype, count) -> None:
        world = len(self.ranks)
        before, after = (self.me - 1) % world, (self.me + 1) % world
        got = torch.empty(count, dtype=dtype)
        own = torch.full((count,), self.value(self.me), dtype=dtype)
        works = [
            self.dist.irecv(got, self.ranks[before], group=self.group),
            self.dist.isend(own, self.ranks[after], group=self.group),
        ]
        for work in works:
            work.wait()
        self.expect(got, self.value(before))


def resources() -> dict:
    status = Path("/proc/self/status").read_text()
    kib = {line.split()[0]: int(line.split()[1]) for line in status.splitlines() if "kB" in line}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "anonymous_kib": kib["RssAnon:"],
        "shared_kib": kib["RssShmem:"],
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def groups_of(dist, rank: int, world: int) -> list[tuple]:
    """(group, its ranks) of the groups that this rank is in; made in one order everywhere."""
    everybody = list(range(world))
    halves = [everybody[: world // 2], everybody[world // 2 :]]
    alternate = [everybody[::2], everybody[1::2]]
    found = [(None, everybody), (dist.new_group(everybody), everybody)]
    for ranks in (*halves, *alternate):
        group = dist.new_group(ranks)
        if rank in ranks:
            found.append((group, ranks))
    return found


def in_threads(bodies) -> None:
    """Runs them at once and raises what the first one of them raised."""
    errors = []

    def run(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def soak(me, num_collectives: int, num_samples: int, seed: int) -> list[dict]:
    """Resources after each part of the work, at quiet moments."""
    dist = join(me)
    mixtures = [
        Mixture(dist, group, ranks, hash((seed, tuple(ranks), number < 1)))
        for number, (group, ranks) in enumerate(groups_of(dist, me.rank, me.world_size))
    ]
    for mixture in mixtures:  # the threads of a group start when they are needed first
        mixture.all_reduce_async(torch.float32, 1)
        mixture.ring(torch.float32, 1)
    share = max(1, num_collectives // num_samples // len(mixtures))
    samples = []
    for _ in range(num_samples):
        in_threads([lambda mixture=m: mixture.run(share) for m in mixtures])
        dist.barrier()
        samples.append(resources() | {"collectives": sum(m.number for m in mixtures)})
        dist.barrier()
    dist.destroy_process_group()
    return samples


def come_and_go(me, times: int, num_samples: int) -> list[dict]:
    """Groups that are made, used and destroyed; the default one each time anew."""
    samples = []
    for number in range(times):
        me.join(prefix=f"life-{number}")
        import libddp.distributed as dist

        half = dist.new_group(list(range(me.world_size)))
        for group in (None, half):
            one = torch.ones(100)
            dist.all_reduce(one, group=group)
            dist.all_reduce(one, group=group, async_op=True).wait()
            assert one[0].item() == me.world_size**2
        dist.destroy_process_group()
        if (number + 1) % max(1, times // num_samples) == 0:
            samples.append(resources() | {"lives": number + 1})
    return samples


def work_in_threads(me) -> list[dict]:
    """Each group in a thread of its own, until all have failed; what each learned."""
    dist = join(me)
    mixtures = [
        Mixture(dist, group, ranks, number)
        for number, (group, ranks) in enumerate(groups_of(dist, me.rank, me.world_size))
        if len(ranks) == me.world_size
    ]
    learned = []
    me.mark("ready")
    in_threads(
        [lambda m=mixture: learned.append(me.learn(lambda: m.run(1 << 30))) for mixture in mixtures]
    )
    dist.destroy_process_group()
    return learned
