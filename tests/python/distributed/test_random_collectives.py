"""Collectives in any order, over groups that come as it goes: each result is Gloo's.

Values are small whole numbers, so that sums are exact in any order of additions; what is divided
(AVG) may differ by a rounding.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import ranks
import torch
import torch.distributed as dist

NUM_SEEDS, NUM_OPERATIONS, MAX_GROUPS = 4, 60, 5
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES += [torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool, torch.complex64]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SIZES = [0, 1, 2, 3, 4, 7, 16, 60, 257, 1000, 1024, 4096, 30000, 1 << 18]


@dataclass
class Group:
    """The same ranks twice; the groups are None where this rank is no member."""

    members: list[int]
    ours: dist.ProcessGroup | None
    gloos: dist.ProcessGroup | None

    @staticmethod
    def of(members: list[int]) -> Group:
        ours, gloos = (dist.new_group(members, backend=b) for b in ("libddp", "gloo"))
        is_in = dist.get_rank() in members
        return Group(members, *((ours, gloos) if is_in else (None, None)))


@dataclass
class Begun:
    """A call that nobody has waited for."""

    what: str
    work: dist.Work
    ours: list[torch.Tensor]
    gloos: list[torch.Tensor]


def values(draw: random.Random, size: int, dtype: torch.dtype, rank: int | None = None):
    """Whole numbers of a rank's own, by default this one's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(64 * draw.randrange(1 << 30) + rank)
    high = 2 if dtype is torch.bool else 4
    return torch.randint(high, (size,), generator=generator).to(dtype)


def in_some_shape(draw: random.Random, flat: torch.Tensor) -> torch.Tensor:
    """The same values: flat, in two dimensions, not contiguous, or off their memory's start."""
    size, kind = flat.numel(), draw.randrange(4)
    if kind == 0 and size and size % 2 == 0:
        return flat.view(2, -1)
    if kind == 1 and size and size % 4 == 0:
        return flat.view(4, -1).t()
    return torch.cat([flat.new_zeros(3), flat])[3:] if kind == 2 else flat


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    strided = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return strided.copy_(tensor)


def assert_alike(ours, gloos, what: str) -> None:
    """`what` names the operation, with AVG where it divides."""
    is_divided = "AVG" in what
    for mine, other in zip(ours, gloos, strict=True):
        if not isinstance(mine, torch.Tensor):
            assert mine == other, what
            continue
        tolerance = {} if is_divided else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(mine, other, msg=lambda text: f"{what}: {text}", **tolerance)


class Program:
    """Each method do_* is an operation; all ranks draw the same ones."""

    def __init__(self, groups: list[Group]):
        self.groups, self.group = groups, groups[0]
        self.begun: list[Begun] = []
        self.compared = 0

    def run(self, seed: int) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        names += 3 * ["do_all_reduce", "do_wait"]
        draw = random.Random(seed)
        for _ in range(NUM_OPERATIONS):
            self.group = draw.choice(self.groups)
            name, argument = draw.choice(names), random.Random(draw.random())
            if self.group.ours is not None or name in ("do_wait", "do_new_group"):
                getattr(self, name)(argument)
        self._wait_for(len(self.begun))

    def _both(self, draw, what, call, *tensors, counts=True) -> None:
        """call(group, is_async, *tensors) on both; what Gloo refuses may be refused.

        Args:
            counts: whether this rank's tensors mean something then.
        """
        gloos, is_async, refused = list(map(copy_of, tensors)), draw.random() < 0.5, False
        try:
            call(self.group.gloos, False, *gloos)
        except (RuntimeError, ValueError):
            refused = True
        try:
            work = call(self.group.ours, is_async, *tensors)
            if refused and is_async:
                work.wait()
        except (RuntimeError, ValueError):
            assert refused, what
        if refused:
            return
        self.begun.append(Begun(what, work, *((tensors, gloos) if counts else ([], []))))
        if not is_async:
            self._compare(self.begun.pop())

    def _compare(self, begun: Begun) -> None:
        assert_alike(begun.ours, begun.gloos, begun.what)
        self.compared += 1

    def _wait_for(self, number: int) -> None:
        for _ in range(number):
            begun = self.begun.pop(0)
            begun.work.wait()
            self._compare(begun)

    def _some(self, draw, sizes=SIZES) -> torch.Tensor:
        return values(draw, draw.choice(sizes), draw.choice(DTYPES))

    def do_wait(self, draw):
        draw = random.Random(dist.get_rank() + draw.randrange(1000))  # ranks need not wait alike
        draw.shuffle(self.begun)
        self._wait_for(draw.randrange(len(self.begun) + 1))

    def do_new_group(self, draw):
        if len(self.groups) < MAX_GROUPS:
            everybody = range(dist.get_world_size())
            members = draw.sample(everybody, draw.randrange(1, len(everybody) + 1))
            self.groups.append(Group.of(sorted(members)))

    def do_barrier(self, draw):
        dist.barrier(self.group.ours)

    def do_all_reduce(self, draw):
        name, tensor = draw.choice(OPS), in_some_shape(draw, self._some(draw))
        op = getattr(dist.ReduceOp, name)

        def call(group, is_async, tensor):
            return dist.all_reduce(tensor, op, group, is_async)

        self._both(draw, f"all_reduce of {facts(tensor)}, {name}", call, tensor)

    def do_all_reduces_at_once(self, draw):
        name, dtype = draw.choice(OPS), draw.choice(DTYPES)
        op = getattr(dist.ReduceOp, name)

        def call(group, is_async, *tensors):
            if group is self.group.gloos:
                return [dist.all_reduce(tensor, op, group) for tensor in tensors]
            with dist._coalescing_manager(group=group, async_ops=is_async) as coalesced:
                for tensor in tensors:
                    dist.all_reduce(tensor, op, group)
            return coalesced

        tensors = [values(draw, draw.choice(SIZES), dtype) for _ in range(draw.randrange(1, 5))]
        self._both(draw, f"{len(tensors)} all_reduces of {dtype}, {name}", call, *tensors)

    def do_reduce(self, draw):
        name, tensor = draw.choice(OPS), in_some_shape(draw, self._some(draw))
        op, root = getattr(dist.ReduceOp, name), draw.choice(self.group.members)

        def call(group, is_async, tensor):
            return dist.reduce(tensor, root, op, group, is_async)

        counts = dist.get_rank() == root
        self._both(draw, f"reduce of {facts(tensor)}, {name}", call, tensor, counts=counts)

    def do_broadcast(self, draw):
        tensor, root = in_some_shape(draw, self._some(draw)), draw.choice(self.group.members)

        def call(group, is_async, tensor):
            return dist.broadcast(tensor, root, group, is_async)

        self._both(draw, f"broadcast of {facts(tensor)}", call, tensor)

    def do_all_gather(self, draw):
        tensor = self._some(draw)
        parts = [torch.zeros_like(tensor) for _ in self.group.members]

        def call(group, is_async, tensor, *parts):
            return dist.all_gather(list(parts), tensor, group, is_async)

        self._both(draw, f"all_gather of {facts(tensor)}", call, tensor, *parts)

    def do_all_gather_into_tensor(self, draw):
        tensor = self._some(draw)
        whole = tensor.new_zeros(len(self.group.members) * tensor.numel())

        def call(group, is_async, tensor, whole):
            return dist.all_gather_into_tensor(whole, tensor, group, is_async)

        self._both(draw, f"all_gather_into_tensor of {facts(tensor)}", call, tensor, whole)

    def do_reduce_scatter(self, draw):
        name, size, dtype = draw.choice(OPS), draw.choice(SIZES), draw.choice(DTYPES)
        op = getattr(dist.ReduceOp, name)
        parts = [values(draw, size, dtype) for _ in self.group.members]
        parts = parts if draw.random() < 0.5 else [torch.cat(parts)]

        def call(group, is_async, own, *parts):
            if len(parts) == len(self.group.members):
                return dist.reduce_scatter(own, list(parts), op, group, is_async)
            return dist.reduce_scatter_tensor(own, *parts, op, group, is_async)

        own = torch.zeros(size, dtype=dtype)
        self._both(draw, f"reduce_scatter of {facts(own)}, {name}", call, own, *parts)

    def do_gather(self, draw):
        tensor, root = self._some(draw), draw.choice(self.group.members)
        holds = dist.get_rank() == root
        parts = [torch.zeros_like(tensor) for _ in self.group.members] if holds else []

        def call(group, is_async, tensor, *parts):
            return dist.gather(tensor, list(parts) or None, root, group, is_async)

        self._both(draw, f"gather of {facts(tensor)}", call, tensor, *parts)

    def do_scatter(self, draw):
        tensor, root = self._some(draw), draw.choice(self.group.members)
        parts = [torch.full_like(tensor, i % 2) for i in range(len(self.group.members))]

        def call(group, is_async, tensor, *parts):
            return dist.scatter(tensor, list(parts) or None, root, group, is_async)

        holds = dist.get_rank() == root
        self._both(draw, f"scatter of {facts(tensor)}", call, tensor, *(parts if holds else []))

    def do_all_to_all_single(self, draw):
        width, dtype = draw.choice([1, 3, 100, 5000]), draw.choice(DTYPES)
        members = self.group.members
        rows = [[draw.choice([0, 1, 2, 5]) for _ in members] for _ in members]
        me = members.index(dist.get_rank())
        to, of = rows[me], [row[me] for row in rows]

        def call(group, is_async, sent, got):
            return dist.all_to_all_single(got, sent, of, to, group, is_async)

        sent = values(draw, sum(to) * width, dtype).view(-1, width)
        got = sent.new_zeros(sum(of), width)
        self._both(draw, f"all_to_all_single of {to} and {of} x {width}", call, sent, got)

    def do_objects(self, draw):
        kind, root = draw.randrange(4), draw.choice(self.group.members)
        size, holds = len(self.group.members), dist.get_rank() == root
        mine = [dist.get_rank(), draw.random(), "y" * draw.choice([1, 100, 100_000])]
        found = []
        for group in (self.group.ours, self.group.gloos):
            got = [None] * size
            if kind == 0:
                dist.all_gather_object(got, mine, group)
            elif kind == 1:
                dist.gather_object(mine, got if holds else None, root, group)
            elif kind == 2:
                got = [*mine, 3] if holds else 4 * [None]
                dist.broadcast_object_list(got, root, group)
            else:
                got = [None]
                sent = [[*mine, i] for i in range(size)] if holds else None
                dist.scatter_object_list(got, sent, root, group)
            found.append(got)
        assert_alike(*found, f"objects of kind {kind}")
        self.compared += 1

    def do_messages(self, draw):
        """Each rank begins its own in an order of its own."""
        if len(self.group.members) < 2:
            return
        messages = [
            (*draw.sample(self.group.members, 2), tag, draw.choice(SIZES[1:]), draw.choice(DTYPES))
            for tag in range(draw.randrange(1, 6))
        ]
        me, seed = dist.get_rank(), draw.randrange(1 << 30)
        own = [message for message in messages if me in message[:2]]
        random.Random(seed + me).shuffle(own)
        works, found = [], []
        for sender, receiver, tag, size, dtype in own:
            sent = values(random.Random(seed + tag), size, dtype, sender)
            if me == sender:
                works.append(dist.isend(sent, receiver, self.group.ours, tag))
            else:
                got = torch.zeros_like(sent)
                works.append(dist.irecv(got, sender, self.group.ours, tag))
                found.append((got, sent))
        for work in works:
            work.wait()
        for got, sent in found:
            assert_alike([got], [sent], f"a message of {facts(sent)}")
            self.compared += 1


def facts(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def programs(num_hosts: int) -> list[int]:
    """How many results each program has compared."""
    import libddp.distributed  # noqa: F401 (registers the backend)

    os.environ["LIBDDP_HOST_ID"] = str(int(os.environ["RANK"]) % num_hosts)
    dist.init_process_group("libddp")
    everybody, compared = Group.of(list(range(dist.get_world_size()))), []
    for seed in range(NUM_SEEDS):
        program = Program([everybody])
        program.run(seed)
        compared.append(program.compared)
    dist.barrier()
    dist.destroy_process_group()
    return compared


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(3, 1), (4, 2)])
def test_programs(num_ranks, num_hosts):
    for compared in ranks.run(programs, num_ranks, num_hosts):
        assert len(compared) == NUM_SEEDS
        assert min(compared) > NUM_OPERATIONS / 4
