"""The fake device as torch's Python sees it: what tests of CUDA's code paths stand on.

Each test runs in a process of its own: the device is every library's accelerator from then on.
"""

import contextlib

import fakegpu
import mock_nccl
import pytest
import ranks
import torch
from torch import nn

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

DEVICE = "fakegpu"


def run(function, *args):
    return ranks.run(function, 1, *args)[0]


def network():
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


def the_module():
    fakegpu.load()
    module = torch.fakegpu
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert module.is_available()
    assert module.device_count() == 4
    module.set_device(1)
    assert module.current_device() == 1
    assert torch.ones(1, device=DEVICE).device == torch.device(DEVICE, 1)
    with module.device(2):
        assert torch.ones(1, device=DEVICE).device == torch.device(DEVICE, 2)
    assert module.current_device() == 1
    side = module.Stream()
    with module.stream(side):
        assert module.current_stream() == side
        assert side.device == torch.device(DEVICE, 1)
    assert module.current_stream() == module.default_stream()
    before = module.memory_allocated()
    kept = torch.ones(1024, device=DEVICE)
    assert module.memory_allocated() == before + kept.nbytes <= module.max_memory_allocated()
    assert torch.ones(2).pin_memory().is_pinned()
    assert repr(torch.arange(2, device=DEVICE)) == "tensor([0, 1], device='fakegpu:1')"


def test_the_device_has_a_module():
    run(the_module)


def events():
    fakegpu.load()
    side, default = torch.fakegpu.Stream(), torch.fakegpu.current_stream()
    begin, end = (torch.fakegpu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with fakegpu.held(side):
        event = side.record_event()
        default.wait_event(event)
        assert not event.query()
        assert not default.query()
    default.synchronize()
    assert event.query()
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0


def test_events_order_streams():
    run(events)


def random_numbers():
    fakegpu.load()
    torch.manual_seed(3)
    cpu = torch.get_rng_state()
    state = torch.fakegpu.get_rng_state()
    assert state.device.type == "cpu"
    assert state.dtype == torch.uint8
    assert state.numel() == 16
    first = torch.nn.functional.dropout(torch.ones(64, device=DEVICE))
    assert set(first.tolist()) == {0.0, 2.0}
    assert torch.equal(cpu, torch.get_rng_state())
    torch.fakegpu.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64, device=DEVICE)))
    torch.manual_seed(3)
    assert torch.equal(state, torch.fakegpu.get_rng_state())
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    numbers = torch.randn(8, device=DEVICE, generator=generator)
    assert torch.equal(numbers, torch.randn(8, device=DEVICE, generator=generator.manual_seed(5)))
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.rand(4, device=DEVICE)
    assert torch.equal(state, torch.fakegpu.get_rng_state())


def test_random_numbers_come_from_the_seed():
    run(random_numbers)


def losses(device, autocast=None):
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=autocast == torch.float16)
    data = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.tensor([0, 1, 2, 3, 0], device=device)
    found = []
    for batch in data:
        mixed = torch.autocast(device, autocast) if autocast else contextlib.nullcontext()
        with mixed:
            loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return torch.tensor(found)


def training(dtype):
    fakegpu.load()
    fakegpu.reset()
    torch.testing.assert_close(losses(DEVICE), losses("cpu"))
    torch.testing.assert_close(losses(DEVICE, dtype), losses("cpu"), rtol=0.05, atol=0.05)
    assert fakegpu.races() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_is_the_cpus(dtype):
    run(training, dtype)


def checkpointed(use_reentrant):
    fakegpu.load()
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(network(), nn.Dropout(0.5)).to(DEVICE)
    x = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    state = torch.fakegpu.get_rng_state()
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.fakegpu.set_rng_state(state)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_draw_the_same_numbers(use_reentrant):
    run(checkpointed, use_reentrant)


def on_a_side_stream(dropped):
    fakegpu.load()
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    model = network().to(DEVICE)
    data = torch.randn(5, 8).to(DEVICE)
    torch.fakegpu.synchronize()
    side, default = torch.fakegpu.Stream(), torch.fakegpu.current_stream()
    fakegpu.reset()
    fakegpu.ignore_wait(dropped)
    data.add_(1)
    side.wait_stream(default)
    with torch.fakegpu.stream(side):
        loss = model(data).sum()
        loss.backward()
    default.wait_stream(side)
    for parameter in model.parameters():
        parameter.grad.mul_(2)
    return fakegpu.num_waits(), len(fakegpu.races())


def test_a_training_step_on_a_side_stream_needs_its_waits():
    num_waits, num_races = run(on_a_side_stream, 0)
    assert num_waits >= 2
    assert num_races == 0
    for edge in (1, num_waits):
        assert run(on_a_side_stream, edge)[1] > 0, f"wait {edge} of {num_waits}"


def out_of_memory():
    fakegpu.load()
    fakegpu.set_memory_limit(0, 1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="fakegpu out of memory"):
        torch.empty(1 << 20, device=DEVICE)
    fakegpu.set_memory_limit(0, -1)
    assert torch.empty(1 << 20, device=DEVICE).numel() == 1 << 20


def test_memory_runs_out():
    run(out_of_memory)


def sharded():
    fakegpu.load()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(f"{DEVICE}:fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(DEVICE, (2,))
    tensor = distribute_tensor(torch.ones(4, 4, device=DEVICE), mesh, [Shard(0)])
    assert tensor.to_local().shape == (2, 4)
    model = network().to(DEVICE)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fakegpu.reset()
    model(torch.randn(5, 8, device=DEVICE)).sum().backward()
    assert fakegpu.races() == []
    assert all(p.grad is not None for p in model.parameters())
    dist.destroy_process_group()


def test_torchs_own_sharding_runs_on_it():
    run(sharded)


def nccl():
    mock_nccl.install()
    mock_nccl.reset()
    assert mock_nccl.issued() == []
    assert mock_nccl.calls("all_reduce") == 0
    assert mock_nccl.live() == (0, 0, 0, 0)


def test_nccl_can_be_replaced():
    run(nccl)
