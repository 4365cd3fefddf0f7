"""What each way to train takes in memory: from facts to Memory. Pure arithmetic.

    for memory in all_settings(facts, job, optimizer):
        print(memory.setting, memory.per_rank)

It follows what libddp allocates, not what the strategies would need at least: see docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from libddp.errors import ArgumentError
from libddp.plan import layout
from libddp.plan.facts import Job, Memory, ModelFacts, Optimizer, OptimizerCost, Parameter, Pass

DDP = "DDP"
ZERO_1 = "ZeRO-1"
NO_SHARD = "NO_SHARD"
SHARD_GRAD_OP = "SHARD_GRAD_OP"
FULL_SHARD = "FULL_SHARD"
HYBRID_SHARD = "HYBRID_SHARD"
SETTINGS = (DDP, ZERO_1, NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD)


def all_settings(
    facts: ModelFacts, job: Job, optimizer: Optimizer, settings: Sequence[str] = SETTINGS
) -> list[Memory]:
    """One Memory for each of the settings, without and with recomputed blocks.

    Raises:
        ArgumentError: ranks that don't fill whole hosts.
    """
    check(job)
    plans = []
    for setting in settings:
        plan = _plan_of(setting, facts, job)
        cost = _worst_cost(plan.owned, optimizer)
        plans += [plan.memory(recompute, one, cost) for recompute, one in facts.passes()]
    return plans


def check(job: Job) -> None:
    for name, value in (("ranks", job.ranks), ("ranks per host", job.ranks_per_host)):
        if value < 1:
            raise ArgumentError(f"{value} {name}. Hint: one at least.")
    if job.ranks % job.ranks_per_host:
        raise ArgumentError(
            f"{job.ranks} ranks do not fill hosts of {job.ranks_per_host}: HYBRID_SHARD, which "
            "shards inside a host and replicates between hosts, cannot run so. Hint: make --ranks "
            "a multiple of --ranks-per-host."
        )


def _worst_cost(owned: list[list], optimizer: Optimizer) -> OptimizerCost:
    """Of the rank whose optimizer needs most; alike ones are computed once."""
    costs = [optimizer(list(shapes)) for shapes in {tuple(shapes): None for shapes in owned}]
    return max(costs, key=lambda cost: cost.state + cost.transient)


class _Plan:
    """The bytes of one setting, before a pass is chosen."""

    def __init__(self, setting: str, facts: ModelFacts, job: Job) -> None:
        self.setting, self.facts, self.job = setting, facts, job
        self.parameters = self.shared = self.gradients = 0
        self.owned: list[list] = []
        self.wrapping = 0

    def communication(self, one: Pass) -> int:
        return 0

    def activations(self, one: Pass) -> int:
        return one.peak

    def memory(self, recompute: bool, one: Pass, cost: OptimizerCost) -> Memory:
        return Memory(
            self.setting,
            recompute,
            self.job.ranks_per_host,
            parameters=self.parameters,
            shared_parameters=self.shared,
            gradients=self.gradients,
            optimizer=cost.state,
            communication=self.communication(one),
            buffers=self.facts.buffers,
            activations=self.activations(one),
            transient=cost.transient,
            wrapping=self.wrapping,
        )


def _plan_of(setting: str, facts: ModelFacts, job: Job) -> _Plan:
    if setting in (DDP, ZERO_1):
        return _Replicated(setting, facts, job)
    return _Sharded(setting, facts, job)


class _Replicated(_Plan):
    """DDP: every rank has the model; gradients are their buckets. ZeRO-1: each rank updates its
    share of the parameters, which exist once if all ranks are on one host."""

    def __init__(self, setting: str, facts: ModelFacts, job: Job) -> None:
        super().__init__(setting, facts, job)
        trained = [p for p in facts.parameters if p.trained]
        numel = sum(p.numel for p in trained)
        low = sum(p.numel for p in facts.parameters) * (job.param_itemsize or 0)
        self.parameters = facts.parameter_bytes + low
        self.gradients = layout.bucket_bytes(trained)
        self._compressed = numel * (job.reduce_itemsize or job.param_itemsize or 0)
        whole = self.parameters + facts.buffers + self.gradients
        self.wrapping = job.ranks_per_host * whole
        if setting == DDP:
            self.owned = [[(p.shape, p.itemsize) for p in trained]]
            return
        self.owned = [_parts_by_dtype(trained, job.ranks, r) for r in _some_ranks(job.ranks)]
        if job.hosts == 1:
            self._share(trained)

    def _share(self, trained: list[Parameter]) -> None:
        """They move in the first step, when gradients are there."""
        self.shared = sum(p.bytes for p in trained)
        self.parameters -= self.shared
        self.wrapping += self.shared

    def communication(self, one: Pass) -> int:
        return self._compressed


class _Sharded(_Plan):
    """FSDP: flat arrays of which every rank of a group owns a block."""

    def __init__(self, setting: str, facts: ModelFacts, job: Job) -> None:
        super().__init__(setting, facts, job)
        self._group = {NO_SHARD: 1, HYBRID_SHARD: job.ranks_per_host}.get(setting, job.ranks)
        #: The ranks of a group are on several hosts: each gathers what it needs.
        self._gathers = setting in (FULL_SHARD, SHARD_GRAD_OP) and job.hosts > 1
        self._flats = layout.flats(facts.parameters)
        #: Per unit, the averages that this rank keeps.
        self._averages = [0] * len(facts.units)
        for flat in self._flats:
            self._add(flat)
        self.wrapping = self._wrapping()
        trained = [p for flat in self._flats for p in flat if p.trained]
        if self._group == 1:
            self.owned = [[(p.shape, p.itemsize) for p in trained]]
        else:
            self.owned = [self._owned_by(rank) for rank in _some_ranks(self._group)]

    def _add(self, flat: list[Parameter]) -> None:
        itemsize, compute = flat[0].itemsize, self._compute_itemsize(flat)
        block = layout.block_numel(flat, self._group)
        if self._gathers:
            self.parameters += block * itemsize + (block * compute if compute != itemsize else 0)
        else:
            whole = layout.whole_numel(flat) * compute
            self.shared += whole if self._group > 1 else 0
            self.parameters += whole if self._group == 1 else 0
            self.parameters += block * itemsize if compute != itemsize else 0
        if flat[0].trained:
            self.gradients += block * itemsize
            self._averages[flat[0].unit] += block * itemsize

    def _wrapping(self) -> int:
        """The model as each rank has made it gives way to its units one by one; one that is on the
        meta device is made unit by unit."""
        unit = max(sum(p.bytes for p in flat) for flat in self._flats)
        ranks, kept = self.job.ranks_per_host, self.facts.buffers
        if self.job.deferred:
            return self.shared + ranks * (self.parameters + unit + kept)
        return ranks * (self.facts.parameter_bytes + kept) + unit

    def _owned_by(self, rank: int) -> list:
        trained = [flat for flat in self._flats if flat[0].trained]
        return [piece for flat in trained for piece in _pieces(flat, self._group, rank)]

    def activations(self, one: Pass) -> int:
        """Gradients of the last step are gone when a pass begins; averages come unit by unit, while
        activations go."""
        if self._group == 1:
            return one.peak
        missing, most, ready = self._num_trained(), one.peak, 0
        for event in one.events:
            if event.what != "gradient":
                continue
            most = max(most, event.peak + ready)
            unit = self.facts.parameters[event.which].unit
            missing[unit] -= 1
            ready += self._averages[unit] if missing[unit] == 0 else 0
        return max(0, most - self.gradients)

    def _num_trained(self) -> list[int]:
        """Per unit."""
        trained = [0] * len(self.facts.units)
        for parameter in self.facts.parameters:
            trained[parameter.unit] += parameter.trained
        return trained

    def _compute_itemsize(self, flat: list[Parameter]) -> int:
        return self.job.param_itemsize or flat[0].itemsize

    def _reduce_itemsize(self, flat: list[Parameter]) -> int:
        return self.job.reduce_itemsize or self._compute_itemsize(flat)

    def communication(self, one: Pass) -> int:
        gradients: dict[int, list] = {}
        gathered: dict[int, list] = {}
        averages = 0
        for flat in self._flats:
            unit, block = flat[0].unit, layout.block_numel(flat, self._group)
            reduce = self._reduce_itemsize(flat)
            if flat[0].trained:
                gradients.setdefault(unit, []).append((block * self._group, reduce))
                averages += block * reduce if reduce != flat[0].itemsize else 0
            if self._gathers:
                compute = self._compute_itemsize(flat)
                gathered.setdefault(unit, []).append((block * self._group, compute))
        if self._group == 1:  # gradients are averaged where they stay
            return averages
        unit_of = [p.unit for p in self.facts.parameters]
        keeps = self.setting == SHARD_GRAD_OP
        schedule = layout.Schedule(unit_of, gradients, gathered, keeps)
        return schedule.run(one.events, self._num_trained()) + averages


def _pieces(parameters: list[Parameter], ranks: int, rank: int) -> list:
    return [(shape, parameters[0].itemsize) for shape in layout.pieces(parameters, ranks, rank)]


def _parts_by_dtype(parameters: list[Parameter], ranks: int, rank: int) -> list:
    sizes = dict.fromkeys(p.itemsize for p in parameters)
    alike = [[p for p in parameters if p.itemsize == size] for size in sizes]
    return [
        (shape, group[0].itemsize)
        for group in alike
        for shape in layout.even_parts(group, ranks, rank)
    ]


def _some_ranks(ranks: int) -> list[int]:
    """The first and the last: between them pieces differ little."""
    return sorted({0, ranks - 1})
