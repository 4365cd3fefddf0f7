"""The arithmetic of flat arrays, buckets and buffers that units share."""

import pytest
import torch
from libddp.plan import layout
from libddp.plan.facts import Event, Parameter


def parameter(*shape, unit=0, trained=True, itemsize=4):
    return Parameter("p", shape, itemsize, trained, unit)


def test_a_block_has_a_chunk_of_each_parameter():
    assert layout.block_numel([parameter(10, 5), parameter(5)], 2) == 32 + 32
    assert layout.block_numel([parameter(7)], 1) == 32
    assert layout.block_numel([parameter(1000, 48)], 3) == layout.round_up(334 * 48, 32)
    assert layout.block_numel([parameter(1, 640)], 4) == 640
    assert layout.whole_numel([parameter(10, 5), parameter(5)]) == 64 + 32


def test_pieces_are_those_of_chunk():
    parameters = [parameter(1000, 48), parameter(100), parameter(4, 64), parameter()]
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            chunks = [torch.empty(p.shape or 1, device="meta").chunk(ranks) for p in parameters]
            own = [tuple(c[rank].shape) for c in chunks if rank < len(c)]
            assert layout.pieces(parameters, ranks, rank) == own


def test_even_parts_cover_every_parameter_once():
    parameters = [parameter(1000, 48), parameter(100), parameter(48, 64), parameter()]
    for ranks in (1, 2, 3, 5):
        owned = [layout.even_parts(parameters, ranks, rank) for rank in range(ranks)]
        numel = sum(layout.Parameter("", shape).numel for shapes in owned for shape in shapes)
        assert numel == sum(p.numel for p in parameters)


def test_a_flat_array_has_one_unit_one_dtype_and_is_trained_or_not():
    parameters = [
        parameter(1),
        parameter(2, unit=1),
        parameter(3, trained=False),
        parameter(4, itemsize=2),
        parameter(5),
    ]
    shapes = [[p.shape for p in flat] for flat in layout.flats(parameters)]
    assert shapes == [[(4,)], [(1,), (5,)], [(3,)], [(2,)]]


def test_buckets_hold_what_is_trained_on_cache_lines():
    assert layout.bucket_bytes([parameter(1), parameter(17), parameter(99, trained=False)]) == 192


def test_a_pool_counts_buffers_that_are_out_at_once():
    pool = layout.Pool()
    pool.take((10, 4))
    pool.give((10, 4))
    pool.take((10, 4))
    assert pool.bytes == 40
    pool.take((10, 4))
    pool.take((10, 2))
    assert pool.bytes == 100


def events_of(*units):
    """One gradient per unit, in this order, after a forward of all of them from the last."""
    forward = [e for u in reversed(units) for e in (Event("forward", u), Event("forward_end", u))]
    return [*forward, *(Event("gradient", u) for u in units)]


def test_at_most_two_units_have_a_buffer_for_gradients():
    sizes = {unit: [(100, 4)] for unit in range(6)}
    schedule = layout.Schedule(range(6), sizes, {}, keep_unsharded=False)
    assert schedule.run(events_of(5, 4, 3, 2, 1, 0), [1] * 6) == 2 * 400


def test_a_unit_whose_first_gradient_is_early_keeps_its_buffer():
    # The root (0) has a gradient at the beginning and one at the end, parameters 0 and 4.
    unit_of = [0, 1, 2, 3, 0]
    schedule = layout.Schedule(unit_of, {u: [(10 + u, 1)] for u in range(4)}, {}, False)
    events = [Event("gradient", parameter) for parameter in (4, 3, 2, 1, 0)]
    assert schedule.run(events, [2, 1, 1, 1]) == 10 + 11 + 12 + 13


@pytest.mark.parametrize(("keeps", "buffers"), [(False, 4), (True, 6)])
def test_gathered_units_are_given_back(keeps, buffers):
    # The root stays. FULL_SHARD: it, one unit, and the one before it, prefetched in backward, with
    # what travels for it. Else all of them, and what travelled for the last.
    sizes = {unit: [(100, 4)] for unit in range(5)}
    forward = [Event("forward", 0)]
    for unit in range(1, 5):
        forward += [Event("forward", unit), Event("forward_end", unit)]
    events = [*forward, Event("forward_end", 0), *(Event("gradient", u) for u in (4, 3, 2, 1, 0))]
    schedule = layout.Schedule(range(5), {}, sizes, keeps)
    assert schedule.run(events, [1] * 5) == buffers * 400
