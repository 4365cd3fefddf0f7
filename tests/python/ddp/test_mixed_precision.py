"""mixed_precision: compute in bfloat16, keep float32, average in the dtype asked for.

The reference does by hand what the argument promises: a bfloat16 copy of the model computes, its
gradients are averaged in the reduce dtype, and float32 parameters are stepped. torch's own
implementation needs an accelerator's streams, so it cannot run beside it on a CPU.
"""

import copy

import checks
import pytest
import torch
import torch.distributed as dist
from ddp_models import ConvNet, Mlp, TiedLanguageModel, libddp_ddp
from torch.nn.parallel.distributed import _MixedPrecision

STEPS = 5


def batch(generator, *shape):
    return torch.randn(*shape, generator=generator)


def mlp_loss(model, generator):
    return model(batch(generator, 4, 16)).float().pow(2).mean()


def averaged(gradient, dtype):
    """As the hook does it: sums in float32, rounds once."""
    sent = gradient.float().to(dtype)
    dist.all_reduce(sent, op=dist.ReduceOp.AVG)
    return sent.float()


def train_by_hand(model, reduce_dtype):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(STEPS):
        low = copy.deepcopy(model).bfloat16()
        low(batch(generator, 4, 16).bfloat16()).float().pow(2).mean().backward()
        for full, part in zip(model.parameters(), low.parameters(), strict=True):
            full.grad = averaged(part.grad, reduce_dtype)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_wrapped(model, precision, **options):
    model = libddp_ddp()(model, mixed_precision=precision, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mlp_loss(model, generator).backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def compare(precision, reduce_dtype, **options):
    torch.manual_seed(3)
    model = Mlp()
    expected = train_by_hand(copy.deepcopy(model), reduce_dtype)
    assert all(map(torch.equal, train_wrapped(model, precision, **options), expected))


def check_bfloat16_throughout():
    compare(_MixedPrecision(param_dtype=torch.bfloat16), torch.bfloat16)


def check_reduction_in_float32():
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(precision, torch.float32, bucket_cap_mb=0.002)


def check_reduction_in_float16_only():
    """Parameters keep their dtype; only the average is rounded."""
    torch.manual_seed(3)
    model = Mlp()
    wrapped = libddp_ddp()(model, mixed_precision=_MixedPrecision(reduce_dtype=torch.float16))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped(x).pow(2).mean().backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x).pow(2).mean().backward()
    for ours, local in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, averaged(local.grad, torch.float16))


def seen_dtypes(model):
    """dtypes of parameters and inputs in a forward of the inner module."""
    seen = []
    model.module.register_forward_pre_hook(
        lambda module, inputs: seen.append((next(module.parameters()).dtype, inputs[0].dtype))
    )
    return seen


def check_inputs_and_parameters_are_low_in_forward_only():
    model = libddp_ddp()(Mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    seen = seen_dtypes(model)
    dtypes = lambda: {p.dtype for p in model.parameters()}  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(batch(generator, 2, 16))
    assert dtypes() == {torch.float32}, "evaluation leaves no low precision behind"
    with model.no_sync():
        mlp_loss(model, generator).backward()
    assert dtypes() == {torch.float32}, "nor does a local backward"
    mlp_loss(model, generator).backward()
    assert dtypes() == {torch.float32}
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 3


def check_gradients_accumulate_in_float32():
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = libddp_ddp()(Mlp(), mixed_precision=precision)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [batch(generator, 4, 16) for _ in range(3)]
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for x in data:
        low = copy.deepcopy(model.module).bfloat16()
        low.zero_grad()
        low(x.bfloat16()).float().pow(2).mean().backward()
        for total, p in zip(sums, low.parameters(), strict=True):
            total += p.grad
    for position, x in enumerate(data):
        model.require_backward_grad_sync = position == 2
        model(x).float().pow(2).mean().backward()
    for total, p in zip(sums, model.parameters(), strict=True):
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        assert torch.equal(p.grad, total)


def check_a_failed_forward_leaves_full_precision():
    model = libddp_ddp()(Mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    mlp_loss(model, torch.Generator().manual_seed(0)).backward()


def check_buffers_tied_weights_and_checkpointing():
    precision = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = libddp_ddp()(ConvNet(), mixed_precision=precision)
    assert model.module.norm.running_mean.dtype == torch.bfloat16
    assert model.module.norm.num_batches_tracked.dtype == torch.int64
    model(torch.randn(2, 3, 4, 4)).sum().backward()

    tied = libddp_ddp()(TiedLanguageModel(), mixed_precision=precision)
    tied(torch.arange(6).view(2, 3))[1].backward()
    assert tied.module.head.weight is tied.module.embedding.weight
    assert tied.module.head.weight.grad.dtype == torch.float32

    def checkpointed(x, use_reentrant):
        layers = model.module.layers
        return torch.utils.checkpoint.checkpoint_sequential(
            layers, 2, x, use_reentrant=use_reentrant
        )

    for use_reentrant in (False, True):
        inner = Mlp()
        inner.forward = lambda x, mode=use_reentrant: checkpointed(x, mode)
        model = libddp_ddp()(inner, mixed_precision=precision)
        x = torch.randn(2, 16, requires_grad=True)
        model(x).float().sum().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def check_bad_dtypes_are_refused():
    for precision, text in (
        (_MixedPrecision(param_dtype=torch.int32), "mixed precision cannot compute in"),
        (_MixedPrecision(reduce_dtype=torch.int64), "gradients cannot be compressed to"),
    ):
        with pytest.raises(ValueError, match=text):
            libddp_ddp()(Mlp(), mixed_precision=precision)


def check_a_second_hook_is_refused():
    model = libddp_ddp()(Mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.compress_gradients(torch.bfloat16)


results, test_mixed_precision = checks.suite(globals(), 2)
