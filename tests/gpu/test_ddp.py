"""DistributedDataParallel: the losses of 20 steps of a small GPT are those of torch's DDP.

On one rank an average changes nothing, so in fp32 they equal torch's and those of the bare model
to the bit. Where gradients are cast on the way (bf16 hooks), both cast alike: to the bit too.
"""

import pytest
import torch
import training
from subject import DDP, DEVICE, IS_CUDA, dist, synchronize, torch_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training import build, close, train

#: Arguments of the wrapper that change nothing about what is computed.
KINDS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "copies": {"gradient_as_bucket_view": False},
    "one bucket": {"bucket_cap_mb": 1000},
    "many buckets": {"bucket_cap_mb": 0.05},
    "device_ids": {"device_ids": [DEVICE.index or 0] if IS_CUDA else None},
}


def ours(model=None, **options):
    return DDP(build() if model is None else model, **options)


def torchs(model=None, **options):
    model = build() if model is None else model
    return TorchDDP(model, process_group=torch_group(), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_as_torch_and_as_the_bare_model(kind):
    wanted = train(build())
    assert train(ours(**KINDS[kind])) == wanted
    assert train(torchs(**KINDS[kind])) == wanted


@pytest.mark.parametrize("accumulate", [2, 4])
def test_no_sync(accumulate):
    wanted = train(build(), accumulate=accumulate)
    assert train(ours(), accumulate=accumulate) == wanted
    assert train(torchs(), accumulate=accumulate) == wanted


def test_kept_gradients_keep_their_values():
    """Over zero_grad(set_to_none=True), as torch's."""

    def kept(model):
        found, wanted = [], []
        for tokens in training.batches(3):
            model.zero_grad()
            model(tokens).backward()
            found += [p.grad.view(-1) for p in model.parameters()]
            wanted += [p.grad.view(-1).clone() for p in model.parameters()]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        return found

    with training.exact():
        torch.testing.assert_close(kept(ours()), kept(torchs()), rtol=0, atol=0)


def test_the_settable_attribute():
    """nanoGPT sets `require_backward_grad_sync` instead of entering no_sync."""
    model = ours()
    tokens = next(training.batches(1))
    for sync in (False, True):
        model.require_backward_grad_sync = sync
        model(tokens).backward()
    bare = build()
    for _ in range(2):
        bare(tokens).backward()
    with training.exact():
        for p, q in zip(model.module.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    wanted = train(build(), autocast=dtype)
    assert train(ours(), autocast=dtype) == wanted
    close(wanted, train(build()), 0.05)  # half precision follows


def test_a_model_in_bfloat16():
    wanted = train(build().bfloat16())
    assert train(ours(build().bfloat16())) == wanted
    assert train(torchs(build().bfloat16())) == wanted


def test_gradient_scaler():
    def scaled(model, **options):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**24, growth_interval=5)
        losses = train(model, scaler=scaler, autocast=torch.float16, **options)
        return losses, scaler.get_scale()

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    for options in ({}, {"clip": clip}):
        wanted = scaled(build(), **options)
        assert scaled(ours(), **options) == wanted  # some steps are skipped
        assert scaled(torchs(), **options) == wanted


def test_clipping():
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert train(ours(), clip=clip) == train(build(), clip=clip)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_optimizers(fused):
    def trained(model):
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
        return train(model, optimizer=adamw)

    assert trained(ours()) == trained(build())


@pytest.mark.libddp
def test_our_optimizer():
    import libddp

    def trained(model, make):
        return train(model, optimizer=make(model.parameters(), lr=1e-3))

    model = ours()
    wanted = train(build(), optimizer=None)
    close(trained(model, libddp.optim.AdamW), wanted, 1e-5)
    shared = ours()
    zero = libddp.optim.AdamW(shared.parameters(), lr=1e-3, shard_over=shared)
    close(train(shared, optimizer=zero), wanted, 1e-5)


class Branches(nn.Module):
    """Uses one of two branches."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, use_left):
        return (self.left if use_left else self.right)(x)


def test_unused_parameters():
    torch.manual_seed(1)
    model = ours(Branches().to(DEVICE), find_unused_parameters=True)
    for step in range(6):
        model.zero_grad()
        model(torch.ones(2, 16, device=DEVICE), step % 2 == 0).sum().backward()
        used, unused = (
            (model.module.left, model.module.right)
            if step % 2 == 0
            else (model.module.right, model.module.left)
        )
        assert used.weight.grad.eq(2).all()
        assert unused.weight.grad is None or unused.weight.grad.eq(0).all()


@pytest.mark.libddp
def test_unused_parameters_without_the_flag_are_named():
    model = ours(Branches().to(DEVICE))

    def steps():
        for _ in range(3):
            model(torch.ones(2, 16, device=DEVICE), True).sum().backward()

    with pytest.raises(RuntimeError, match=r"right\.weight"):
        steps()


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, 0.0),
    "fp16": (default_hooks.fp16_compress_hook, 0.0),
    "bf16": (default_hooks.bf16_compress_hook, 0.0),
    # Its random projections are drawn per process, alike; its sums go through QR in fp32.
    "powersgd": (powerSGD_hook.powerSGD_hook, 1e-3),
}


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(name):
    hook, tolerance = HOOKS[name]

    def hooked(model, group):
        state = group
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=2, start_powerSGD_iter=3
            )
        model.register_comm_hook(state, hook)
        return train(model)

    if name == "bf16" and not IS_CUDA:
        pytest.skip("torch's hook asks for NCCL")
    found, wanted = hooked(ours(), None), hooked(torchs(), torch_group())
    if tolerance:
        close(found, wanted, tolerance)
    else:
        assert found == wanted


@pytest.mark.libddp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compression_in_cpp(dtype):
    model, hook = ours(), {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    model.compress_gradients(dtype)
    if hook == "bf16" and not IS_CUDA:
        close(train(model), train(build()), 0.05)
        return
    reference = torchs()
    reference.register_comm_hook(torch_group(), HOOKS[hook][0])
    assert train(model) == train(reference)


@pytest.mark.limit(150)
@pytest.mark.parametrize("inner", [True, False], ids=["inside", "outside"])
def test_compiled(inner):
    """Compiled kernels add in orders of their own."""
    model = ours(torch.compile(build())) if inner else torch.compile(ours())
    with training.exact():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for tokens in training.batches(8):
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    close(losses, train(build(), 8), 1e-3)


@pytest.mark.libddp
def test_gradients_stay_in_their_buckets():
    model = ours()

    def places():
        return [p.grad.data_ptr() for p in model.parameters()]

    for number, tokens in enumerate(training.batches(5)):
        model.zero_grad()
        model(tokens).backward()
        if number == 2:  # the buckets have their final shape
            before = places()
    assert places() == before


def test_buffers():
    torch.manual_seed(3)
    model = ours(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(DEVICE))
    for _ in range(3):
        model(torch.randn(4, 8, device=DEVICE)).sum().backward()
    assert model.module[1].num_batches_tracked.item() == 3


def test_sparse_gradients():
    def trained(wrap):
        torch.manual_seed(4)
        model = wrap(nn.Embedding(50, 8, sparse=True).to(DEVICE))
        optimizer = torch.optim.SparseAdam(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.tensor([1, 2, 2, 7], device=DEVICE)).pow(2).sum().backward()
            optimizer.step()
        return next(model.parameters()).detach()

    torch.testing.assert_close(trained(ours), trained(lambda model: model))


def test_uneven_inputs():
    model = ours()
    with model.join():
        for tokens in training.batches(2):
            model(tokens).backward()


@pytest.mark.cuda
def test_backward_on_several_streams():
    """Autograd runs each node on its forward's stream; the buckets wait for all of them."""

    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.streams = [torch.cuda.Stream() for _ in range(4)]

        def forward(self, x):
            main, outs = torch.cuda.current_stream(), []
            for part, stream in zip(self.parts, self.streams, strict=True):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    outs.append(part(x))
            for stream in self.streams:
                main.wait_stream(stream)
            return sum(outs)

    torch.manual_seed(6)
    net = Streams().to(DEVICE)
    model = ours(net)
    for _ in range(4):
        x = torch.randn(32, 64, device=DEVICE)
        model.zero_grad()
        model(x).square().sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_inputs_are_moved_to_the_device():
    model = ours(nn.Linear(4, 4).to(DEVICE), device_ids=[DEVICE.index])
    assert model(torch.ones(2, 4)).device == DEVICE


@pytest.mark.libddp
@pytest.mark.cuda
def test_over_torchs_own_engine():
    """Our reducer over torch's ProcessGroupNCCL, by from_c10d."""
    group = dist.from_c10d(torch_group())
    assert train(DDP(build(), process_group=group)) == train(build())


def test_our_backend_under_torchs_ddp():
    """torch's DDP over the default group, which is libddp's."""
    assert train(TorchDDP(build())) == train(build())


@pytest.mark.libddp
def test_explain_names_the_device():
    model = ours()
    model(next(training.batches(1))).backward()
    synchronize()
    assert "bucket" in str(model.explain())
