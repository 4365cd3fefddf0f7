"""FullyShardedDataParallel and fully_shard: losses of 20 steps beside the bare model's, torch's.

On one rank nothing is added up over ranks. In fp32 both faces therefore give the bare model's
losses to the bit. In bf16 they are compared with torch's FSDP2, which casts at the same places:
within BF16, because the two add up a step's micro-batches and cast gradients in another order.
"""

import itertools

import pytest
import torch
import training
from subject import DEVICE, FSDP, IS_CUDA, IS_LIBDDP, checkpoint, dist, fully_shard, torch_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from training import build, close, train

#: One rounding to 8 bits of mantissa is 2^-9; 20 steps of AdamW carry differences on.
BF16 = 2.0**-7
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
TORCH_NEEDS = {} if IS_LIBDDP else {"use_orig_params": True}


def wrapped(model=None, **options):
    model = build() if model is None else model
    options = {"auto_wrap_policy": training.policy(), "device_id": DEVICE} | TORCH_NEEDS | options
    return FSDP(model, **options)


def sharded(model=None, function=fully_shard, **options):
    model = build() if model is None else model
    for block in model.blocks:
        function(block, **options)
    function(model, **options)
    return model


def torchs(model=None, **options):
    mesh = DeviceMesh.from_group(torch_group(), DEVICE.type)
    return sharded(model, torch_fully_shard, mesh=mesh, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy):
    model = wrapped(sharding_strategy=ShardingStrategy[strategy])
    assert train(model) == train(build())


def test_fully_shard():
    wanted = train(build())
    assert train(sharded()) == wanted
    assert train(torchs()) == wanted


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(reshard):
    assert train(sharded(reshard_after_forward=reshard)) == train(build())


def test_one_unit():
    assert train(wrapped(auto_wrap_policy=None)) == train(build())


def test_plain_tensors():
    if not IS_LIBDDP:
        pytest.skip("torch has DTensors only")
    assert train(sharded(use_dtensor=False)) == train(build())


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16(reduce):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    wanted = train(torchs(mp_policy=policy))
    close(train(sharded(mp_policy=policy)), wanted, BF16)
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=reduce, buffer_dtype=torch.bfloat16
    )
    close(train(wrapped(mixed_precision=precision)), wanted, BF16)
    close(wanted, train(build()), 0.05)


def test_autocast():
    """Linear layers cast what they are given: the same kernels as without sharding."""
    close(train(sharded(), autocast=torch.bfloat16), train(build(), autocast=torch.bfloat16), BF16)


def test_gradient_scaler():
    if IS_LIBDDP:
        from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    else:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    def scaled(model):
        scaler = ShardedGradScaler(DEVICE.type, init_scale=2.0**24, growth_interval=5)
        return train(model, scaler=scaler, autocast=torch.float16), scaler.get_scale()

    plain = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**24, growth_interval=5)
    wanted = train(build(), scaler=plain, autocast=torch.float16)
    found, scale = scaled(wrapped())
    close(found, wanted, BF16)
    assert scale == plain.get_scale()


@pytest.mark.parametrize("face", ["wrapper", "function"])
def test_clipping(face):
    def clip(model):
        if hasattr(model, "clip_grad_norm_") and face == "wrapper":
            model.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    model = wrapped() if face == "wrapper" else sharded()
    # The norm is a sum over shards: another order than over whole tensors.
    close(train(model, clip=clip), train(build(), clip=clip), 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients(mode):
    (tokens,) = training.batches(1)

    def evaluated(model):
        losses = [train(model)]
        model.eval()
        with training.exact(), mode():
            losses.append(model(tokens).item())
        model.train()
        return losses, train(model)

    wanted = evaluated(build())
    assert evaluated(wrapped()) == wanted
    assert evaluated(sharded()) == wanted


@pytest.mark.parametrize("accumulate", [2, 4])
def test_no_sync(accumulate):
    wanted = train(build(), accumulate=accumulate)
    assert train(wrapped(), accumulate=accumulate) == wanted


def test_set_requires_gradient_sync():
    model, wanted = sharded(), train(build(), accumulate=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with training.exact():
        for tokens in training.batches(training.STEPS):
            optimizer.zero_grad()
            for number, part in enumerate(tokens.chunk(2)):
                model.set_requires_gradient_sync(number == 1)
                loss = model(part) / 2
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses == wanted


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_optimizers(fused):
    def trained(model):
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
        return train(model, optimizer=adamw)

    assert trained(sharded()) == trained(build())
    if IS_LIBDDP:
        assert trained(wrapped()) == trained(build())


@pytest.mark.libddp
def test_our_optimizer():
    import libddp

    model = sharded()
    found = train(model, optimizer=libddp.optim.AdamW(model.parameters(), lr=1e-3))
    bare = build()
    wanted = train(bare, optimizer=torch.optim.AdamW(bare.parameters(), lr=1e-3, fused=True))
    assert found == wanted


@pytest.mark.cuda
def test_cpu_offload():
    """Parameters rest in pinned host memory, and the optimizer steps there."""
    host = build(device="cpu")
    model = wrapped(host, cpu_offload=CPUOffload(offload_params=True))
    assert all(p.device.type == "cpu" for p in model.parameters())
    close(train(model), train(build()), 1e-4)  # another AdamW
    one = sharded(build(device="cpu"), offload_policy=CPUOffloadPolicy())
    assert all(p.to_local().is_pinned() for p in one.parameters())
    close(train(one), train(build()), 1e-4)


def test_a_model_on_the_host_goes_to_the_device():
    model = wrapped(build(device="cpu"))
    assert all(p.device == DEVICE for p in model.parameters())
    assert train(model) == train(build())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_blocks_with_dropout(use_reentrant):
    """The same numbers are drawn again, whichever order blocks are gathered in."""

    def recomputing(model):
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=use_reentrant)
        return model

    torch.manual_seed(3)
    wanted = train(build(dropout=0.2))
    torch.manual_seed(3)
    assert train(sharded(recomputing(build(dropout=0.2)))) == wanted


def test_frozen_parameters():
    def frozen(model):
        for p in model.blocks[0].parameters():
            p.requires_grad = False
        return model

    assert train(sharded(frozen(build()))) == train(frozen(build()))


def test_hybrid():
    mesh = torch.distributed.init_device_mesh(DEVICE.type, (1, 1), mesh_dim_names=("r", "s"))
    assert train(sharded(mesh=mesh)) == train(build())
    if IS_LIBDDP:
        model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
        assert train(model) == train(build())


@pytest.mark.limit(120)
def test_compiled_blocks():
    model = build()
    for block in model.blocks:
        block.compile()
    close(train(sharded(model), 8), train(build(), 8), 1e-3)


def test_explicit_prefetch():
    model = sharded()
    blocks = list(model.blocks)
    for one, following in itertools.pairwise(blocks):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    assert train(model) == train(build())


def test_unshard_and_reshard():
    model = sharded()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    weight = model.blocks[0].out.weight
    assert torch.equal(weight, build().blocks[0].out.weight)
    model.blocks[0].reshard()
    assert train(model) == train(build())


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_a_hook_behind_the_reduction(on_a_stream):
    stream = torch.cuda.Stream() if on_a_stream and IS_CUDA else None

    def hooked(model):
        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=stream)
        return model

    found = train(hooked(sharded()))
    assert found == train(hooked(torchs()))
    assert found != train(build())


def test_summoned_parameters():
    model, bare = wrapped(), build()
    with FSDP.summon_full_params(model):
        for p, q in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.libddp
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_over_torchs_own_engine(strategy):
    """Our sharding over torch's own backend, by from_c10d."""
    group = dist.from_c10d(torch_group())
    model = wrapped(process_group=group, sharding_strategy=ShardingStrategy[strategy])
    assert train(model) == train(build())


def test_torchs_fsdp2_over_the_default_group():
    """torch's own engine over libddp's backend."""
    assert train(sharded(None, torch_fully_shard)) == train(build())


@pytest.mark.skipif(not IS_CUDA, reason="torch's FSDP1 wants a device")
def test_torchs_fsdp1_over_the_default_group():
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    model = TorchFSDP(
        build(), auto_wrap_policy=training.policy(), use_orig_params=True, device_id=DEVICE
    )
    assert train(model) == train(build())
