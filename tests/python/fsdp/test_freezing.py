"""Parameters that scripts freeze and unfreeze after sharding, beside torch's FSDP2 on Gloo."""

import checks
import ddp_models
import fsdp_models as models
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS = 8


def whole(model):
    """By name, in memory of their own."""
    if hasattr(model, "module"):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def assert_equal(found, wanted, tolerance):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def frozen_model():
    """Blocks 1 and 2 are frozen, and in block 0 a bias and the norms."""
    model = models.build()
    for block in model.blocks[1:]:
        block.requires_grad_(False)
    model.blocks[0].up.bias.requires_grad_(False)
    model.blocks[0].norm_1.requires_grad_(False)
    return model


def change(model, step):
    """Single parameters and whole units, off and on."""
    blocks = model.blocks
    if step == 1:
        blocks[0].up.bias.requires_grad_(True)
    if step == 2:
        blocks[1].requires_grad_(True)
    if step == 3:
        blocks[0].requires_grad_(False)
        blocks[2].down.weight.requires_grad_(True)
    if step == 5:
        blocks[0].attention.requires_grad_(True)
        blocks[1].up.weight.requires_grad_(False)
        model.norm.requires_grad_(False)
    if step == 6:
        model.requires_grad_(True)


def train(model, make_optimizer, change=change):
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(STEPS):
        change(model, step)
        optimizer.zero_grad()
        model(models.tokens(step))[1].backward()
        optimizer.step()
    return whole(model)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    """With an eps that keeps rounding errors of gradients near zero from becoming steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def our_adamw(parameters):
    from libddp.optim import AdamW

    return AdamW(parameters, lr=0.01, eps=1e-3)


def check_freezing_equals_torchs_fsdp2():
    for make_optimizer in (sgd, adamw):
        wanted = train(models.theirs(frozen_model()), make_optimizer)
        for wrap in (models.shard, models.wrap):
            # The order of additions within a rank's part of a tensor is the same; sums of squares
            # and products are rounded once more or less by the vector units.
            assert_equal(train(wrap(frozen_model()), make_optimizer), wanted, 1e-6)


def check_freezing_with_libddps_adamw():
    wanted = train(models.theirs(frozen_model()), adamw)
    for wrap in (models.shard, models.wrap):
        assert_equal(train(wrap(frozen_model()), our_adamw), wanted, 1e-6)


def check_a_frozen_gradient_stays_what_it_is():
    def run(model):
        weight = model.blocks[0].up.weight
        model(models.tokens(0))[1].backward()
        kept = models.whole_gradients(model)["blocks.0.up.weight"]
        for parameter in model.parameters():
            if parameter is not weight:
                parameter.grad = None
        weight.requires_grad_(False)
        model(models.tokens(1))[1].backward()
        assert torch.equal(models.whole_gradients(model)["blocks.0.up.weight"], kept)
        weight.requires_grad_(True)
        model(models.tokens(2))[1].backward()
        return {"kept": kept, "sum": models.whole_gradients(model)["blocks.0.up.weight"]}

    wanted = run(models.theirs())
    for wrap in (models.shard, models.wrap):
        assert_equal(run(wrap()), wanted, 1e-6)


def check_only_what_is_trained_is_averaged():
    model = models.shard(frozen_model())
    model(models.tokens(0))[1].backward()
    for block in model.blocks[1:]:
        assert all(p.grad is None for p in block.parameters())
        assert not block._libddp_wrapped_module.unit.has_gradient_memory()
    assert model.blocks[0].up.bias.grad is None
    assert model.blocks[0].up.weight.grad is not None


def check_freezing_between_forward_and_backward():
    def run(model):
        bias, weight = model.blocks[1].up.bias, model.blocks[1].up.weight
        weight.requires_grad_(False)
        loss = model(models.tokens(0))[1]
        bias.requires_grad_(False)
        loss.backward()
        assert bias.grad is None
        assert weight.grad is None
        bias.requires_grad_(True)
        weight.requires_grad_(True)
        return models.whole_gradients(model)

    assert_equal(run(models.shard()), run(models.theirs()), 1e-6)


def check_freezing_while_gradients_add_up():
    def run(model):
        block = model.blocks[1]
        model.set_requires_gradient_sync(False)
        model(models.tokens(0))[1].backward()
        block.requires_grad_(False)
        model(models.tokens(1))[1].backward()
        model.set_requires_gradient_sync(True)
        block.up.weight.requires_grad_(True)
        model(models.tokens(2))[1].backward()
        return models.whole_gradients(model)

    assert_equal(run(models.shard()), run(models.theirs()), 1e-6)


def check_inputs_before_frozen_parameters():
    """The gradient goes on through frozen parameters when all trained ones have theirs."""

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(torch.randn(6, 6))
            self.second = torch.nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return (x @ self.first).tanh() @ self.second

    torch.manual_seed(3)
    plain = Two()
    torch.manual_seed(3)
    sharded = models.libddp_fsdp().fully_shard(Two())
    for first_is_frozen in (True, False):
        gradients = []
        for model in (plain, sharded):
            model.first.requires_grad_(not first_is_frozen)
            x = torch.ones(2, 6, requires_grad=True)
            model(x).sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Adapter(nn.Linear):
    pass


class Adapted(nn.Module):
    """Frozen parameters around a unit that is trained, and can be left out."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4), requires_grad=False)
        self.layer, self.adapter = nn.Linear(4, 4), Adapter(4, 4)
        self.layer.requires_grad_(False)

    def forward(self, x, adapts=True):
        y = self.layer(self.scale * x)
        return y + self.adapter(x) if adapts else y


class AdaptedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, x, adapts=True):
        for block in self.blocks:
            x = torch.tanh(block(x, adapts))
        return x


def check_a_second_forward_before_the_pass():
    """As of a reference model: preferences (DPO) with an adapter."""
    from torch.nn.parallel import DistributedDataParallel

    x = torch.ones(2, 4) + dist.get_rank()

    def gradients(wrap, records):
        module = models.build(AdaptedNet)
        model = wrap(module)
        trained = model(x)
        with torch.set_grad_enabled(records):
            reference = model(x, adapts=False)
        (trained - reference).pow(2).mean().backward()
        return module, model

    def ddp(module):
        return DistributedDataParallel(module, process_group=ddp_models.gloo())

    def of_fsdp1(module):
        return models.wrap(module, auto_wrap_policy=ModuleWrapPolicy({Adapted, Adapter}))

    def of_fsdp2(module):
        for block in module.blocks:
            models.libddp_fsdp().fully_shard(block.adapter)
        return models.shard(module)

    for records in (False, True):
        wanted, _ = gradients(ddp, False)
        trained = [p.grad for p in wanted.parameters() if p.requires_grad]
        for wrap in (of_fsdp1, of_fsdp2):
            _, model = gradients(wrap, records)
            found = list(models.whole_gradients(model).values())
            assert len(found) == len(trained) == 4
            for own, other in zip(found, trained, strict=True):
                torch.testing.assert_close(own, other)


def check_checkpoints_after_unfreezing():
    fsdp = models.libddp_fsdp()
    model = models.wrap(frozen_model())
    optimizer = adamw(model.parameters())
    for step in range(2):
        if step == 1:
            model.requires_grad_(True)
        optimizer.zero_grad()
        model(models.tokens(step))[1].backward()
        assert all(p.grad.shape == p.shape for p in model.parameters() if p.requires_grad)
        optimizer.step()
    state = fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert set(state["state"]) == set(models.plain_names(model.named_parameters()))


def freeze_on_one_rank():
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    model = models.shard()
    model(models.tokens(0))
    model.blocks[1].up.weight.requires_grad_(dist.get_rank() == 0)
    try:
        model(models.tokens(1))
    except RuntimeError as error:
        return str(error)


def test_ranks_that_freeze_differently():
    for text in ranks.run(freeze_on_one_rank, 2):
        assert "a sharded forward" in text, text
        assert "trains 38 of 39" in text, text


results, test_freezing = checks.suite(globals(), 2)
