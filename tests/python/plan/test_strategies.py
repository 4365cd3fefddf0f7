"""From facts to bytes, for each setting."""

import pytest
from libddp.errors import ArgumentError
from libddp.plan import table
from libddp.plan.facts import Event, Job, Memory, ModelFacts, OptimizerCost, Parameter, Pass
from libddp.plan.strategies import SETTINGS, all_settings

MIB = 1 << 20
ROWS = MIB // 16  # of four floats: a MiB


def facts(num_units=4, peak=10 * MIB, recomputed=None, **options):
    """A root and units of one parameter of a MiB each; gradients come from the last."""
    parameters = [
        Parameter(f"p{unit}", (ROWS, 4), unit=unit, **options) for unit in range(num_units)
    ]
    units = [str(unit) if unit else "" for unit in range(num_units)]
    forward = [Event(what, u) for u in range(num_units) for what in ("forward", "forward_end")]
    events = (*forward, *(Event("gradient", u) for u in reversed(range(num_units))))
    plain = Pass(peak, peak, events)
    again = Pass(recomputed, recomputed, events) if recomputed else None
    return ModelFacts(tuple(parameters), tuple(units), plain, again)


def two_moments(sizes):
    """An optimizer with two numbers per element, and none beyond."""
    numel = sum(Parameter("", shape).numel for shape, _ in sizes)
    return OptimizerCost(8 * numel, transient=0)


def plan(setting, job=None, **options):
    found = all_settings(facts(**options), job or Job(2, 2), two_moments)
    return next(memory for memory in found if memory.setting == setting)


def test_every_setting_is_planned_with_and_without_recomputation():
    found = all_settings(facts(recomputed=MIB), Job(2, 2), two_moments)
    assert [(m.setting, m.recompute) for m in found] == [(s, r) for s in SETTINGS for r in (0, 1)]
    whole = [m for m in found if m.setting in ("DDP", "ZeRO-1", "NO_SHARD")]
    assert {m.activations for m in whole if m.recompute} == {MIB}


def test_ddp_has_everything_on_every_rank():
    memory = plan("DDP")
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * MIB, 4 * MIB, 8 * MIB)
    assert memory.per_rank == 26 * MIB
    assert memory.step_per_host == 52 * MIB
    assert memory.state_per_host == 32 * MIB


def test_zero_1_shares_parameters_and_splits_the_optimizer():
    memory = plan("ZeRO-1")
    assert memory.parameters == 0
    assert memory.shared_parameters == memory.gradients == memory.optimizer == 4 * MIB
    assert memory.per_rank == (2 + 4 + 4 + 10) * MIB
    between = plan("ZeRO-1", Job(4, 2))
    assert (between.parameters, between.shared_parameters) == (4 * MIB, 0)
    assert between.optimizer == 2 * MIB


def test_full_shard_on_one_host_has_parameters_once_and_two_buffers():
    memory = plan("FULL_SHARD")
    assert (memory.parameters, memory.shared_parameters) == (0, 4 * MIB)
    assert (memory.gradients, memory.optimizer) == (2 * MIB, 4 * MIB)
    assert memory.communication == 2 * MIB
    assert plan("HYBRID_SHARD").per_rank == memory.per_rank
    assert plan("SHARD_GRAD_OP").per_rank == memory.per_rank


def test_no_shard_averages_gradients_where_they_stay():
    memory = plan("NO_SHARD")
    assert memory.parameters == memory.gradients == 4 * MIB
    assert memory.shared_parameters == memory.communication == 0
    low = plan("NO_SHARD", Job(2, 2, reduce_itemsize=2))
    assert low.communication == 2 * MIB  # they travel in another precision


def test_between_hosts_parameters_are_gathered():
    full = plan("FULL_SHARD", Job(4, 2), num_units=8)
    keeps = plan("SHARD_GRAD_OP", Job(4, 2), num_units=8)
    hybrid = plan("HYBRID_SHARD", Job(4, 2), num_units=8)
    assert full.shared_parameters == 0
    assert full.parameters == full.gradients == 2 * MIB
    assert keeps.communication > full.communication > hybrid.communication
    assert hybrid.shared_parameters == 8 * MIB
    assert hybrid.gradients == 4 * MIB


def test_averages_come_while_activations_go():
    # 2 MiB of averages per rank in the end, of 4 units. Live: 10 before the first, then 9, ...
    falling = [Event(e.what, e.which) for e in facts().plain.events if e.what != "gradient"]
    falling += [Event("gradient", unit, (7 + unit) * MIB) for unit in (3, 2, 1, 0)]
    first = facts()
    model = ModelFacts(first.parameters, first.units, Pass(10 * MIB, 10 * MIB, tuple(falling)))
    full = next(m for m in all_settings(model, Job(2, 2), two_moments) if m.setting == "FULL_SHARD")
    assert full.gradients + full.activations == 10 * MIB
    late = [Event("gradient", unit, 10 * MIB) for unit in (3, 2, 1, 0)]
    model = ModelFacts(first.parameters, first.units, Pass(10 * MIB, 10 * MIB, tuple(late)))
    full = next(m for m in all_settings(model, Job(2, 2), two_moments) if m.setting == "FULL_SHARD")
    assert full.gradients + full.activations == 11.5 * MIB  # three of the four, and all activations


def test_mixed_precision_shares_the_low_one():
    memory = plan("FULL_SHARD", Job(2, 2, param_itemsize=2, reduce_itemsize=2))
    assert memory.shared_parameters == 2 * MIB
    assert memory.parameters == 2 * MIB  # a block in full precision
    assert memory.communication == 2 * MIB // 2 + MIB  # buffers, and averages until they are added
    ddp = plan("DDP", Job(2, 2, param_itemsize=2))
    assert (ddp.parameters, ddp.gradients) == (6 * MIB, 4 * MIB)


def test_frozen_parameters_have_neither_gradients_nor_state():
    frozen = [Parameter("frozen", (ROWS, 4), trained=False), Parameter("head", (ROWS,))]
    events = (Event("forward", 0), Event("forward_end", 0), Event("gradient", 1))
    model = ModelFacts(tuple(frozen), ("",), Pass(0, 0, events))
    for memory in all_settings(model, Job(2, 2), two_moments):
        assert memory.gradients <= MIB // 4
        assert memory.optimizer <= MIB // 2


def test_the_larger_of_pass_and_optimizer_counts():
    memory = Memory("DDP", False, 1, parameters=5, activations=7, transient=3)
    assert memory.per_rank == 12
    assert Memory("DDP", False, 1, parameters=5, activations=2, transient=3).per_rank == 8


def test_wrapping_holds_a_whole_model_per_rank():
    assert plan("FULL_SHARD").wrapping == 9 * MIB
    assert plan("DDP").wrapping == 16 * MIB
    assert plan("ZeRO-1").wrapping == 20 * MIB
    assert plan("FULL_SHARD", Job(2, 2, deferred=True)).wrapping == 6 * MIB
    tight = Memory("FULL_SHARD", False, 2, shared_parameters=4, wrapping=12)
    assert (tight.step_per_host, tight.per_host) == (4, 12)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(0, 1), "0 ranks. Hint"),
        (Job(2, -1), "-1 ranks per host. Hint"),
        (Job(5, 2), "5 ranks do not fill hosts of 2: HYBRID_SHARD"),
    ],
)
def test_ranks_that_cannot_be(job, words):
    with pytest.raises(ArgumentError, match=words):
        all_settings(facts(), job, two_moments)


def sized(name, size, recompute=False):
    return Memory(name, recompute, 2, parameters=size)


def test_the_smallest_that_fits_is_named():
    plans = [sized("DDP", 40), sized("ZeRO-1", 30), sized("FULL_SHARD", 20, recompute=True)]
    assert [p.setting for p in table.choose(plans, 70)] == ["FULL_SHARD", "ZeRO-1"]
    assert [p.setting for p in table.choose(plans, 70, process=10)] == ["FULL_SHARD"]
    assert table.verdict(plans, 70).splitlines() == [
        "smallest that fits 70 B: FULL_SHARD + checkpointing, 40 B on a host",
        "smallest that fits 70 B without recomputation: ZeRO-1, 60 B on a host",
    ]
    text = table.as_text(plans, 70)
    assert [line.split()[-1] for line in text.splitlines()] == ["fits", "no", "yes", "yes"]


def test_what_does_not_fit_is_said():
    plans = [sized("DDP", 40), sized("ZeRO-1", 30)]
    words = "does not fit 50 B: the smallest, ZeRO-1, needs 62 B on a host"
    assert table.verdict(plans, 50, process=1) == words
