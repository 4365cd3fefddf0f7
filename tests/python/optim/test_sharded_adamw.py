"""AdamW(shard_over=model) on two and three ranks, with whole and with sharded gradients, against
torch's DDP and fused AdamW."""

import copy
import os

import checks
import ddp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import wrap
from torch import nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
#: Set by run_all.
shard_gradients = False


class Net(nn.Module):
    """Sizes that no number of ranks divides, a layout of its own, a parameter without a use."""

    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(20, 33)
        self.out = nn.Linear(33, 3)
        self.scale = nn.Parameter(torch.ones(()))
        if unused:
            self.spare = nn.Linear(4, 5)

    def forward(self, images):
        x = self.conv(images).relu().mean(-1).flatten(1)
        return self.out(self.wide(x).tanh()) * self.scale


def images(step):
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(2, 3, 4, 4, generator=generator)


def loss_of(model, step):
    return model(images(step)).pow(2).mean()


def groups(net):
    return [
        {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]


def sharded(model, **options):
    from libddp.optim import AdamW

    options.setdefault("shard_gradients", shard_gradients)
    return AdamW(groups(model), lr=0.01, shard_over=model, **options)


def torchs(model, **options):
    return torch.optim.AdamW(groups(model), lr=0.01, fused=True, **options)


def torch_ddp(net, **arguments):
    return nn.parallel.DistributedDataParallel(net, process_group=models.gloo(), **arguments)


def pair(unused=False, **options):
    """(model, optimizer) of ours and of torch's, from the same weights."""
    net = Net(unused)
    arguments = {"find_unused_parameters": True} if unused else {}
    ours = wrap(copy.deepcopy(net), bucket_cap_mb=0.001, **arguments)
    theirs = torch_ddp(net, **arguments)
    return (ours, sharded(ours, **options)), (theirs, torchs(theirs, **options))


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_alike(ours, theirs):
    """Bit for bit where the additions have one order."""
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert models.is_equal_on_all_ranks(mine), name
        if WORLD == 2:
            assert torch.equal(mine, other), name
        else:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def check_weights_and_losses_are_torchs():
    (ours, mine), (theirs, other) = pair()
    losses, expected = train(ours, mine, 6), train(theirs, other, 6)
    assert losses == (expected if WORLD == 2 else pytest.approx(expected, rel=1e-4))
    assert_alike(ours, theirs)


def check_amsgrad_maximize_and_a_tensor_as_rate():
    options = {"amsgrad": True, "maximize": True}
    (ours, mine), (theirs, other) = pair(**options)
    for optimizer in (mine, other):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.02)
    train(ours, mine, 3), train(theirs, other, 3)
    assert_alike(ours, theirs)


def check_each_rank_has_its_share_of_the_state():
    (ours, mine), _ = pair()
    train(ours, mine, 2)
    own = sum(state["exp_avg"].numel() for state in mine.state.values())
    total = sum(p.numel() for p in ours.parameters())
    counts = [None] * WORLD
    dist.all_gather_object(counts, own)
    assert sum(counts) == total
    assert max(counts) < 0.75 * total


def check_unused_parameters():
    (ours, mine), (theirs, other) = pair(unused=True)
    train(ours, mine, 4), train(theirs, other, 4)
    assert ours.module.spare.weight.grad is None
    assert ours.module.spare.weight not in mine.state
    assert_alike(ours, theirs)


def check_clipping_is_over_the_whole_model():
    for norm_type in (2.0, float("inf")):
        (ours, mine), (theirs, other) = pair()
        for step in range(4):
            norms = []
            for model, optimizer in ((ours, mine), (theirs, other)):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1])
        if not shard_gradients:  # the norm adds up in torch's order
            assert_alike(ours, theirs)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def check_gradients_are_whole():
    (ours, mine), (theirs, other) = pair()
    for step in range(4):
        train(ours, mine, 1, first=step), train(theirs, other, 1, first=step)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if WORLD == 2 and not shard_gradients:
                assert torch.equal(p.grad, q.grad)
            elif not shard_gradients:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        alike = [models.is_equal_on_all_ranks(p.grad) for p in ours.parameters()]
        assert all(alike) == (step == 0 or not shard_gradients)


def accumulate(model, optimizer, steps, begin):
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(3):
            with begin(model, part):
                loss_of(model, 3 * step + part).backward()
        optimizer.step()


def check_accumulation_without_synchronisation():
    from contextlib import nullcontext

    (ours, mine), (theirs, other) = pair()
    for model, optimizer in ((ours, mine), (theirs, other)):
        accumulate(model, optimizer, 4, lambda m, part: m.no_sync() if part < 2 else nullcontext())
    assert_alike(ours, theirs)


def check_accumulation_on_top_of_averages():
    """Every pass synchronises, or the first one does: gradients are added to averages."""
    from contextlib import nullcontext

    for synced in ((0, 1, 2), (0, 2)):

        def begin(model, part, synced=synced):
            return nullcontext() if part in synced else model.no_sync()

        (ours, mine), (theirs, other) = pair()
        for model, optimizer in ((ours, mine), (theirs, other)):
            accumulate(model, optimizer, 4, begin)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def check_gradients_that_a_script_replaced():
    (ours, mine), (theirs, other) = pair()
    for step in range(3):
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            for p in model.parameters():
                p.grad = p.grad * 0.5
                if model is ours:  # torch's fused kernel wants the parameter's strides
                    p.grad = p.grad.contiguous()
            optimizer.step()
    assert_alike(ours, theirs)


def check_whole_states_pass_to_torch_and_back():
    (ours, mine), (theirs, other) = pair()
    train(ours, mine, 3), train(theirs, other, 3)
    state = mine.state_dict()
    for number, entries in other.state_dict()["state"].items():
        for key, value in entries.items():
            assert state["state"][number][key].shape == value.shape
            if WORLD == 2:
                assert torch.equal(state["state"][number][key], value), (number, key)
    # Into a new optimizer of ours, which has not seen a pass, into this one, and into torch's.
    fresh = wrap(copy.deepcopy(ours.module))
    loaded = sharded(fresh)
    loaded.load_state_dict(copy.deepcopy(state))
    mine.load_state_dict(copy.deepcopy(state))
    again = torch_ddp(copy.deepcopy(ours.module))
    into_torch = torchs(again)
    into_torch.load_state_dict(copy.deepcopy(state))
    for group in into_torch.param_groups:
        group["fused"] = True  # ours has None there
    for model, optimizer in ((fresh, loaded), (ours, mine), (again, into_torch)):
        train(model, optimizer, 2, first=3)
    assert_alike(fresh, again)
    assert_alike(ours, again)


def check_one_rank_may_save_alone():
    (ours, mine), _ = pair()
    train(ours, mine, 2)
    if RANK == 0:
        assert len(mine.state_dict()["state"]) == len(list(ours.parameters()))
        assert len(ours.module.state_dict()) == len(list(ours.parameters()))
    train(ours, mine, 1, first=2)


def check_scaler_skips_on_all_ranks():
    (ours, mine), (theirs, other) = pair()
    scalers = []
    for model, optimizer in ((ours, mine), (theirs, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            optimizer.zero_grad()
            infinite = step in (2, 4) and RANK == 0
            loss = loss_of(model, step) * (float("inf") if infinite else 1.0)
            scaler.scale(loss).backward()
            if step > 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scalers.append(scaler.get_scale())
    assert scalers == [2.0, 2.0]
    assert_alike(ours, theirs)


def check_parameters_are_whole_and_saved_alone():
    import io

    (ours, mine), _ = pair()
    train(ours, mine, 2)
    weight = ours.module.out.weight
    assert weight.shape == (3, 33)
    file = io.BytesIO()
    torch.save(weight.detach(), file)
    assert len(file.getvalue()) < 4 * weight.numel() + 2000
    twin = copy.deepcopy(ours.module)
    assert torch.equal(twin.conv.weight, ours.module.conv.weight)
    dist.barrier()


def check_sharding_begins_after_some_steps():
    net = Net()
    ours, theirs = wrap(copy.deepcopy(net)), torch_ddp(net)
    first, other = torchs(ours), torchs(theirs)
    train(ours, first, 2), train(theirs, other, 2)
    mine = sharded(ours)
    mine.load_state_dict(first.state_dict())
    train(ours, mine, 2, first=2), train(theirs, other, 2, first=2)
    assert_alike(ours, theirs)
    if shard_gradients:
        with pytest.raises(RuntimeError, match=r"AdamW.step\(\): its parameters belong to a model"):
            first.step()
    else:
        first.step(), other.step()  # a step more, of whole averages
        dist.barrier()


def check_a_step_needs_averages():
    (ours, mine), _ = pair()
    mine.step()  # no gradients: nothing to do
    with ours.no_sync():
        loss_of(ours, 0).backward()
    with pytest.raises(RuntimeError, match="has not been averaged"):
        mine.step()
    train(ours, mine, 1)
    with ours.no_sync():
        loss_of(ours, 0).backward()
    with pytest.raises(RuntimeError, match="has not been averaged"):
        mine.step()


def check_moved_parameters_are_refused():
    (ours, mine), _ = pair()
    train(ours, mine, 1)
    loss_of(ours, 0).backward()
    ours.module.out.bias.data = ours.module.out.bias.data.clone()
    with pytest.raises(RuntimeError, match=r"'out.bias' was given other memory"):
        mine.step()


def check_mistakes():
    from libddp.optim import AdamW

    net = Net()
    with pytest.raises(ValueError, match="takes a libddp"):
        AdamW(net.parameters(), shard_over=net)
    with pytest.raises(ValueError, match="shard_gradients=True without shard_over"):
        AdamW(net.parameters(), shard_gradients=True)
    model = wrap(net)
    with pytest.raises(ValueError, match=r"lacks 'conv.weight' and 1 more of the model's trained"):
        AdamW([p for n, p in model.named_parameters() if "conv" not in n], shard_over=model)
    other = nn.Parameter(torch.ones(7))
    with pytest.raises(ValueError, match=r"parameter 7 of the optimizer, \[7\], is not one"):
        AdamW([*model.parameters(), other], shard_over=model)
    optimizer = sharded(model)
    with pytest.raises(ValueError, match="is not one that the model trains"):
        optimizer.add_param_group({"params": [other]})
    with pytest.raises(RuntimeError, match="another optimizer shares it already"):
        sharded(model)
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="gradients of an optimizer whose work is shared"):
        model.compress_gradients(torch.bfloat16)
    with pytest.raises(RuntimeError, match="cannot join uneven inputs"):
        model.join()._joinables  # noqa: B018


def check_models_that_do_not_fit():
    compressed = wrap(Net())
    compressed.compress_gradients(torch.bfloat16)
    with pytest.raises(RuntimeError, match="a communication hook exchanges the gradients"):
        sharded(compressed)
    table = wrap(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(RuntimeError, match="some gradients are sparse"):
        sharded(table)
    from torch.nn.parallel.distributed import _MixedPrecision

    low = wrap(Net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="sharded over a model with mixed_precision"):
        sharded(low)


def run_all(with_sharded_gradients):
    from libddp.distributed import init_process_group

    global shard_gradients
    shard_gradients = with_sharded_gradients
    init_process_group("libddp")
    torch.set_num_threads(1)
    return checks.run(globals())


@pytest.fixture(
    scope="module",
    params=[(2, False), (3, False), (2, True), (3, True)],
    ids=lambda param: f"{param[0]}-ranks-{'sharded' if param[1] else 'whole'}-gradients",
)
def results(request):
    world_size, with_sharded_gradients = request.param
    return ranks.run(run_all, world_size, with_sharded_gradients, deadline=180.0)


@pytest.mark.parametrize("name", checks.names(globals()))
def test_on_all_ranks(results, name):
    checks.verify(results, name)
