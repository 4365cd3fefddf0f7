"""AdamW(shard_over=model) on the fake device: the bits of an AdamW that nobody shares."""

import copy

import fakegpu
import pytest
import ranks
import torch
from device_models import batch, made, of_cpu, place
from libddp.distributed import get_rank, init_process_group

from libddp.optim import AdamW

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

STEPS = 4
WHOLE, OWN = {"shard_gradients": False}, {"shard_gradients": True}


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def start(kind, sharding, **options):
    """Model and optimizer; without `sharding` every rank has the whole state."""
    device = place(kind)
    model = made(device)
    shared = {} if sharding is None else {"shard_over": model, **sharding}
    return model, AdamW(groups(model), lr=0.05, **shared, **options)


def on_cpu(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), tree)


def trained(kind, sharding, amsgrad, twice):
    """Parameters and state after some steps, one perhaps with two passes, and of a resumed run."""
    init_process_group("gloo")
    model, optimizer = start(kind, sharding, amsgrad=amsgrad)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        model(batch(step)).pow(2).sum().backward()
        if step == 2 and twice:
            model(batch(9)).pow(2).sum().backward()
        waits = kind == "cpu" or fakegpu.num_host_waits(get_rank())
        optimizer.step()
        if kind != "cpu" and step > 1:
            assert fakegpu.num_host_waits(get_rank()) == waits
    state = copy.deepcopy(on_cpu(optimizer.state_dict()))
    resumed, other = start(kind, sharding, amsgrad=amsgrad)
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(state))
    for step in range(2):
        other.zero_grad()
        resumed(batch(step)).pow(2).sum().backward()
        other.step()
    if kind != "cpu":
        assert fakegpu.races() == []
    return of_cpu(model), state, of_cpu(resumed)


@pytest.mark.parametrize("sharding", [WHOLE, OWN])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_steps_states_and_resumed_runs_have_the_bits_of_the_cpu(sharding, amsgrad):
    # A second pass over averages that only their owners have rounds in another place.
    twice = sharding == WHOLE
    wanted = ranks.run(trained, 2, "cpu", None, amsgrad, twice)
    found = ranks.run(trained, 2, "fakegpu", sharding, amsgrad, twice)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def scaled(kind, sharding):
    """With a GradScaler and clipping; rank 1's gradients overflow once."""
    init_process_group("gloo")
    model, optimizer = start(kind, sharding)
    device = model.device.type
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)).pow(2).mean()
        factor = float("inf") if step == 2 and get_rank() == 1 else 1.0
        scaler.scale(loss * factor).backward()
        if step == 0:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).cpu())
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    if kind != "cpu":
        assert fakegpu.races() == []
    return [parameter.detach().cpu() for parameter in model.parameters()], norms


@pytest.mark.parametrize("sharding", [WHOLE, OWN])
def test_a_scaler_and_clipping_decide_alike_on_all_ranks(sharding):
    wanted = ranks.run(scaled, 2, "cpu", None)
    found = ranks.run(scaled, 2, "fakegpu", sharding)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, found[0][0], found[1][0]))


def state_after_two_steps():
    init_process_group("gloo")
    model, optimizer = start("fakegpu", WHOLE)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step)).pow(2).sum().backward()
        optimizer.step()
    own = [entries["exp_avg"].numel() for entries in optimizer.state.values()]
    assert all(
        t.device == model.device for entries in optimizer.state.values() for t in entries.values()
    )
    return sum(own), sum(p.numel() for p in model.parameters())


def test_each_rank_has_its_part_of_the_state_on_its_device():
    parts = ranks.run(state_after_two_steps, 2)
    numbers = {whole for _, whole in parts}
    assert numbers == {sum(own for own, _ in parts)}
    assert all(own < whole for own, whole in parts)
