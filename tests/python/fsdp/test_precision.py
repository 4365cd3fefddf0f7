"""MixedPrecision: each field means what it means in torch's FSDP, which runs beside it on Gloo."""

import functools

import checks
import ddp_models
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

BF16 = torch.bfloat16


class Recorder(nn.Module):
    """A layer that remembers the dtypes that it saw."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 1 / 3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.seen = (x.dtype, self.layer.weight.dtype, self.shift.dtype)
        return self.layer(x.to(self.layer.weight.dtype)) + self.shift


class Net(nn.Module):
    def __init__(self, make_norm=nn.Identity):
        super().__init__()
        self.first = Recorder()
        self.norm = make_norm()
        self.second = Recorder()

    def forward(self, x):
        self.seen = x.dtype
        return self.second(self.norm(self.first(x)).float()).float()


def batch():
    return torch.sin(torch.arange(12.0).view(3, 4) + dist.get_rank())


def both(make_model=Net, policy=None, **arguments):
    """(libddp's, torch's) wrapped model of the same values."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    policy = policy or ModuleWrapPolicy({Recorder})
    ours = models.wrap(models.build(make_model), auto_wrap_policy=policy, **arguments)
    theirs = FullyShardedDataParallel(
        models.build(make_model),
        process_group=ddp_models.gloo(),
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        **arguments,
    )
    return ours, theirs


def seen(model):
    return (model.module.seen, model.first.module.seen, model.second.module.seen)


def check_dtypes_that_modules_see():
    for fields in (
        {"param_dtype": BF16},
        {"param_dtype": BF16, "cast_forward_inputs": True},
        {"param_dtype": BF16, "cast_root_forward_inputs": False},
        {"param_dtype": BF16, "cast_root_forward_inputs": False, "cast_forward_inputs": True},
        {"buffer_dtype": BF16},
        {"reduce_dtype": BF16},
        {"cast_forward_inputs": True},
    ):
        ours, theirs = both(mixed_precision=MixedPrecision(**fields))
        outputs = [model(batch()) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs)
        assert seen(ours) == seen(theirs), fields


def check_gradients_in_low_precision():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for fields in (
            {"param_dtype": BF16},
            {"param_dtype": BF16, "reduce_dtype": torch.float32},
            {"reduce_dtype": BF16},
        ):
            precision = MixedPrecision(keep_low_precision_grads=True, **fields)
            ours, theirs = both(mixed_precision=precision, sharding_strategy=strategy)
            for model in (ours, theirs):
                model(batch()).sum().backward()
            wanted = {p.grad.dtype for p in theirs.parameters() if p.grad is not None}
            assert {p.grad.dtype for p in ours.parameters()} == wanted, (strategy, fields)
            assert all(p.dtype == torch.float32 for p in ours.parameters())


def check_low_gradients_have_torchs_values():
    precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    ours, _ = both(mixed_precision=precision)
    # torch cannot summon such gradients where they are sharded.
    _, theirs = both(mixed_precision=precision, sharding_strategy=ShardingStrategy.NO_SHARD)
    for model in (ours, theirs):
        model(batch()).sum().backward()
        model(batch()).sum().backward()
    with type(ours).summon_full_params(ours, with_grads=True):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.grad.dtype == other.grad.dtype == BF16
            torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-2)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)  # takes gradients of another dtype
    optimizer.step()
    optimizer.zero_grad()
    ours(batch()).sum().backward()
    assert all(p.grad.dtype == BF16 for p in ours.parameters())
    norm = ours.clip_grad_norm_(0.01)
    assert norm > 0.01
    torch.testing.assert_close(
        ours.clip_grad_norm_(1.0).float(), torch.tensor(0.01), rtol=0.05, atol=0
    )


def check_states_are_in_full_precision():
    precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    ours, theirs = both(mixed_precision=precision)
    plain = models.build(Net).state_dict()
    for model in (ours, theirs):
        model(batch())
        assert model.first.module.shift.dtype == BF16
        state = model.state_dict()
        assert {name: v.dtype for name, v in state.items()} == {
            n: v.dtype for n, v in plain.items()
        }
        for name, value in state.items():
            tolerance = 5e-3 if "shift" in name else 0.0  # buffers have been in bf16
            torch.testing.assert_close(value, plain[name], rtol=tolerance, atol=0)
        model.load_state_dict({name: value + 0 for name, value in plain.items()})
        assert model.first.module.shift.dtype == BF16
    with type(ours).summon_full_params(ours):
        pass  # nothing is rounded on its way out and in
    torch.testing.assert_close(
        ours.state_dict()["first.layer.weight"], plain["first.layer.weight"], rtol=0, atol=0
    )


def check_buffers_of_a_part_with_its_own_precision():
    inner = models.wrap(
        models.build(Recorder),
        auto_wrap_policy=None,
        mixed_precision=MixedPrecision(buffer_dtype=torch.float16),
    )
    outer = models.wrap(
        nn.Sequential(inner, Recorder()),
        auto_wrap_policy=None,
        mixed_precision=MixedPrecision(buffer_dtype=BF16),
    )
    assert all(b.dtype == torch.float32 for b in outer.buffers() if b.is_floating_point())
    outer(batch().to(torch.float16))
    assert [b.dtype for b in outer.buffers() if b.is_floating_point()] == [torch.float16, BF16]
    assert all(
        b.dtype == torch.float32
        for b in outer.state_dict().values()
        if b.dim() > 0 and b.is_floating_point()
    )


def buffers(model):
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


FIRST_USES = (
    lambda model: model(batch()),
    lambda model: model.eval()(batch()),
    lambda model: model.state_dict(),
    lambda model: model.load_state_dict(models.build(Net).state_dict()),
    lambda model: list(model.parameters()),
)


def check_when_buffers_are_cast():
    for use in FIRST_USES:
        found = []
        for model in both(mixed_precision=MixedPrecision(buffer_dtype=BF16)):
            before = buffers(model)
            dtypes = [b.dtype for b in before]
            with torch.no_grad():
                before[0].mul_(1 + 2**-9)  # twice: lost if it were in low precision already
                before[0].mul_(1 + 2**-9)
            use(model)
            after = buffers(model)
            assert all(one is other for one, other in zip(before, after, strict=True))
            values = [b.float().tolist() for b in after]
            found.append((dtypes, [b.dtype for b in after], values))
        assert found[0] == found[1]


def check_classes_that_keep_full_precision():
    def batch_norm():
        return nn.BatchNorm1d(4)

    def layer_norm():
        return nn.LayerNorm(4)

    by_function = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Recorder)
    )
    for policy in (ModuleWrapPolicy({Recorder}), by_function):
        for make_norm, fields in (
            (batch_norm, {}),
            (layer_norm, {"_module_classes_to_ignore": [nn.LayerNorm]}),
            (layer_norm, {"_module_classes_to_ignore": []}),
        ):
            precision = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16, **fields)
            dtypes, outputs = [], []
            for model in both(lambda norm=make_norm: Net(norm), policy, mixed_precision=precision):
                norms = [
                    m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.LayerNorm))
                ]
                found = []
                norms[0].register_forward_hook(
                    lambda m, args, out, found=found: found.append(
                        (args[0].dtype, m.weight.dtype, out.dtype)
                    )
                )
                outputs.append(model(batch()))
                outputs[-1].sum().backward()
                buffers = [b.dtype for b in norms[0].buffers() if b.is_floating_point()]
                dtypes.append((found, buffers))
            assert dtypes[0] == dtypes[1], (make_norm, policy)
            torch.testing.assert_close(*outputs)


results, test_precision = checks.suite(globals(), 2)
