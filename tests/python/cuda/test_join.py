"""Uneven inputs of a model on the fake device: torch's Join, and the numbers of the CPU."""

import fakegpu
import pytest
import ranks
import torch
from device_models import batch, made, of_cpu, place
from libddp.distributed import get_rank, init_process_group
from torch.distributed.algorithms.join import Join

from libddp.optim import AdamW

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))


def uneven(kind, divide, own_context, options):
    """Rank r has 2 * r + 1 batches."""
    init_process_group("gloo")
    device = place(kind)
    model = made(device, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    joined = (
        model.join(divide_by_initial_world_size=divide)
        if own_context
        else Join([model], divide_by_initial_world_size=divide)
    )
    with joined:
        for step in range(2 * get_rank() + 1):
            optimizer.zero_grad()
            model(batch(step)).pow(2).sum().backward()
            optimizer.step()
    # Behind it the model is an ordinary one.
    optimizer.zero_grad()
    model(batch(9)).pow(2).sum().backward()
    optimizer.step()
    if kind != "cpu":
        assert fakegpu.races() == []
    return of_cpu(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize(("divide", "own_context"), [(True, False), (False, True)])
def test_ranks_that_have_run_out_of_data_give_the_bits_of_the_cpu(divide, own_context, options):
    arguments = (divide, own_context, options)
    on_cpu, on_device = (ranks.run(uneven, 2, kind, *arguments) for kind in ("cpu", "fakegpu"))
    torch.testing.assert_close(on_device, on_cpu, rtol=0, atol=0)


def run_out(model):
    """Rank r has r + 1 batches, and nobody goes on without it."""
    with model.join(throw_on_early_termination=True):
        for step in range(get_rank() + 1):
            model(batch(step)).pow(2).sum().backward()


def early_termination():
    init_process_group("gloo")
    model = made(place("fakegpu"))
    with pytest.raises(RuntimeError, match="exhausted"):
        run_out(model)
    AdamW(model.parameters(), shard_over=model)
    with pytest.raises(RuntimeError, match="sharded over the ranks cannot join uneven inputs"):
        model.join()


def test_early_termination_and_what_cannot_join_are_errors():
    ranks.run(early_termination, 2)
