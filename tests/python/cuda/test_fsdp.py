"""Sharded models on the fake device, over the mock NCCL, against the same models on the CPU.

Attention has another kernel there than on the CPU, so losses and norms are close and not equal; and
AdamW makes whole steps of gradients that are rounding alone (the keys' bias).
"""

import double_backward
import fakegpu
import fsdp_models as models
import mock_nccl
import pytest
import ranks
import torch
from in_place_group import InPlace

pytestmark = pytest.mark.skipif(fakegpu.missing() is not None, reason=str(fakegpu.missing()))

DEVICE = "fakegpu"
STEPS_OF_ROUNDING = 0.08
TOKENS = torch.randint(13, (4, 3, 6), generator=torch.Generator().manual_seed(3))


def start():
    """A group of all ranks, each with a device of its own."""
    from libddp.distributed import get_rank, init_process_group

    fakegpu.load()
    mock_nccl.install()
    init_process_group("libddp")
    torch.fakegpu.set_device(get_rank())
    fakegpu.reset()
    return get_rank()


def stop():
    from libddp.distributed import destroy_process_group

    found = fakegpu.races()
    assert found == [], found
    destroy_process_group()


def trained(model, device, rank, clips=True):
    """Losses of some steps, and norms."""
    from libddp.optim import AdamW

    optimizer = AdamW(model.parameters(), lr=0.01)
    found = []
    for batch in TOKENS.to(device):
        optimizer.zero_grad()
        _, loss = model((batch + rank) % 13)
        loss.backward()
        found.append(loss.detach().cpu())
        if clips:
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).cpu())
        optimizer.step()
    return found


def host_mesh(size):
    """Without a mesh a model goes to the device."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (size,))


def whole(model):
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def require_close(found, wanted, tolerance=1e-5):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def wrapped(arguments, tolerance=1e-5):
    rank = start()
    on_device = models.wrap(device_id=torch.device(DEVICE, rank), **arguments)
    assert {p.device.type for p in on_device.parameters()} == {DEVICE}
    on_host = models.wrap(**arguments)
    on_both = trained(on_device, DEVICE, rank), trained(on_host, "cpu", rank)
    require_close(*on_both, tolerance)
    states = whole(on_device), whole(on_host)
    require_close(states[0].values(), states[1].values(), STEPS_OF_ROUNDING)
    on_device.load_state_dict(states[1])
    stop()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_class_trains_as_on_the_host(strategy):
    from torch.distributed.fsdp import ShardingStrategy

    ranks.run(wrapped, 2, {"sharding_strategy": ShardingStrategy[strategy]})


def over_another_engine(strategy):
    """from_c10d: collectives on the device through a group that is not libddp's."""
    from libddp.distributed import from_c10d
    from torch.distributed.fsdp import ShardingStrategy

    rank = start()
    inner = InPlace(torch.distributed.group.WORLD)
    options = {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device(DEVICE)}
    other = models.wrap(process_group=from_c10d(inner), **options)
    on_both = trained(other, DEVICE, rank), trained(models.wrap(**options), DEVICE, rank)
    require_close(*on_both, tolerance=0)
    assert "allgather" in inner.calls
    stop()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_class_over_another_engine(strategy):
    ranks.run(over_another_engine, 2, strategy)


def test_the_class_in_lower_precision():
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    ranks.run(wrapped, 2, {"mixed_precision": precision}, 0.05)


def functional(use_dtensor):
    rank = start()
    plain = models.build().to(DEVICE)
    plain.head.weight = plain.embedding.weight  # the move has made two of them
    on_device = models.shard(plain, use_dtensor=use_dtensor)
    on_host = models.shard(mesh=host_mesh(2), use_dtensor=use_dtensor)
    clips = not use_dtensor  # torch's own norm of DTensors is a collective of torch's
    on_both = trained(on_device, DEVICE, rank, clips), trained(on_host, "cpu", rank, clips)
    require_close(*on_both)
    parts = [list(model.parameters()) for model in (on_device, on_host)]
    for one, other in zip(*parts, strict=True):
        one, other = (getattr(p, "_local_tensor", p).detach().cpu() for p in (one, other))
        require_close([one], [other], STEPS_OF_ROUNDING)
    stop()


@pytest.mark.parametrize("use_dtensor", [False, True])
def test_the_function(use_dtensor):
    ranks.run(functional, 2, use_dtensor)


def hooked(on_a_stream):
    """The hook's changes are in the gradients, in whatever stream it makes them."""
    rank = start()
    on_device, on_host = models.shard(), models.shard(mesh=host_mesh(2))
    stream = torch.fakegpu.Stream() if on_a_stream else None
    for model in (on_device, on_host):
        for module in model.modules():
            if hasattr(module, "set_all_reduce_hook"):
                module.set_all_reduce_hook(lambda reduced: reduced.mul_(3), stream=stream)
    on_both = trained(on_device, DEVICE, rank, False), trained(on_host, "cpu", rank, False)
    require_close(*on_both)
    gradients = [[p.grad.to_local().cpu() for p in m.parameters()] for m in (on_device, on_host)]
    require_close(*gradients, tolerance=STEPS_OF_ROUNDING)
    stop()


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_a_hook_behind_the_reduction(on_a_stream):
    ranks.run(hooked, 2, on_a_stream)


def twice_through_the_graph(recomputes):
    rank = start()
    from libddp.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def trained_twice(loss, device, **options):
        model = double_backward.build(recomputes).to(device)
        double_backward.shard(model, fully_shard, use_dtensor=False, **options)
        return double_backward.train(model, loss, rank, device)

    offload = {"offload_policy": CPUOffloadPolicy()}
    for loss in double_backward.LOSSES:
        wanted = trained_twice(loss, "cpu", mesh=host_mesh(2))
        for options in ({}, {"reshard_after_forward": False}, offload):
            found = trained_twice(loss, DEVICE, **options)
            assert found == pytest.approx(wanted, rel=1e-4), (loss.__name__, options)
    stop()


@pytest.mark.parametrize("recomputes", double_backward.PARTS)
def test_gradients_of_gradients(recomputes):
    ranks.run(twice_through_the_graph, 2, recomputes)


def evaluated():
    rank = start()
    on_device = models.wrap(device_id=torch.device(DEVICE, rank))
    on_host = models.wrap()
    for mode in (torch.no_grad, torch.inference_mode):
        losses = []
        for model, device in ((on_device, DEVICE), (on_host, "cpu")):
            model.eval()
            with mode():
                losses.append(model(TOKENS[0].to(device))[1].cpu())
            model.train()
        require_close(losses[:1], losses[1:])
    require_close(trained(on_device, DEVICE, rank), trained(on_host, "cpu", rank))
    stop()


def test_evaluation_without_gradients():
    ranks.run(evaluated, 2)


def states(folder):
    """Snapshots and optimizer states of a model on the device, loaded into one on the host."""
    rank = start()
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp import load_snapshot, save_snapshot

    from libddp.optim import AdamW

    pairs = []
    for device in (torch.device(DEVICE, rank), torch.device("cpu")):
        model = models.wrap(models.build(), device_id=device)
        pairs.append((model, AdamW(model.parameters(), lr=0.01)))
    (model, optimizer), (other, other_optimizer) = pairs
    model(TOKENS[0].to(DEVICE))[1].backward()
    optimizer.step()
    save_snapshot(folder, model, optimizer, {"step": 1})
    assert load_snapshot(folder, other, other_optimizer) == {"step": 1}
    for one, copy in zip(whole(model).values(), whole(other).values(), strict=True):
        assert torch.equal(one, copy)
    full = FSDP.optim_state_dict(model, optimizer)
    assert {t.device.type for s in full["state"].values() for t in s.values()} == {"cpu"}
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
    for parameter, entries in optimizer.state.items():
        assert {tensor.device for tensor in entries.values()} == {parameter.device}
    optimizer.step()
    stop()


def test_states_go_round(tmp_path):
    ranks.run(states, 2, str(tmp_path / "snapshot"))


def deferred():
    rank = start()
    device = torch.device(DEVICE, rank)
    model = models.wrap(models.on_meta(), device_id=device, param_init_fn=init)
    assert {p.device for p in model.parameters()} == {device}
    first = whole(models.wrap(models.build(), device_id=device, sync_module_states=True))
    model.load_state_dict(first)
    for one, other in zip(whole(model).values(), first.values(), strict=True):
        assert torch.equal(one, other)
    stop()


def init(module):
    module.to_empty(device=DEVICE, recurse=False)
    models.reset(module)


def test_parameters_on_the_meta_device_get_memory_on_the_device():
    ranks.run(deferred, 2)


def mistakes():
    start()
    with pytest.raises(ValueError, match="on 4 devices here"):
        models.wrap(models.build(), device_id=torch.device(DEVICE, 7))
    stop()


def offloaded(strategy, precision, tolerance):
    """The bits of the same model without offloading; what is offloaded is on the CPU."""
    from torch.distributed.fsdp import ShardingStrategy

    rank = start()
    found = []
    for offloads in (True, False):
        model = models.wrap(
            models.build(),
            device_id=torch.device(DEVICE, rank),
            cpu_offload=offloads,
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=precision,
        )
        home = "cpu" if offloads else DEVICE
        assert {p.device.type for p in model.parameters()} == {home}
        losses = trained(model, DEVICE, rank, clips=False)
        assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {home}
        found.append(losses + list(whole(model).values()))
    require_close(*found, tolerance)
    stop()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_offloaded_parameters(strategy):
    ranks.run(offloaded, 2, strategy, None, 1e-4)


def test_offloaded_parameters_in_lower_precision():
    from torch.distributed.fsdp import MixedPrecision

    ranks.run(offloaded, 2, "FULL_SHARD", MixedPrecision(torch.bfloat16), 1e-4)


def offloaded_hybrid():
    """Two ranks own a block each and two more the same: as on the host."""
    from torch.distributed.fsdp import ShardingStrategy

    rank = start()
    arguments = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    arguments["device_mesh"] = models.two_by_two()
    device = torch.device(DEVICE, rank)
    on_device = models.wrap(models.build(), device_id=device, cpu_offload=True, **arguments)
    on_host = models.wrap(models.build(), **arguments)
    assert {p.device.type for p in on_device.parameters()} == {"cpu"}
    assert {p.is_pinned() for p in on_device.parameters() if p.numel()} == {True}
    require_close(trained(on_device, DEVICE, rank), trained(on_host, "cpu", rank), 1e-4)
    require_close(whole(on_device).values(), whole(on_host).values(), STEPS_OF_ROUNDING)
    stop()


def test_offloaded_parameters_with_replicas():
    ranks.run(offloaded_hybrid, 4)


def offloaded_by_the_function(use_dtensor, pin_memory):
    rank = start()
    from torch.distributed.fsdp import CPUOffloadPolicy

    found = []
    for policy in (CPUOffloadPolicy(pin_memory=pin_memory), None):
        plain = models.build().to(DEVICE)
        plain.head.weight = plain.embedding.weight
        model = models.shard(plain, use_dtensor=use_dtensor, offload_policy=policy)
        home = DEVICE if policy is None else "cpu"
        assert {p.device.type for p in model.parameters()} == {home}
        if policy is not None:
            own = (getattr(p, "_local_tensor", p) for p in model.parameters())
            assert {p.is_pinned() for p in own if p.numel()} == {pin_memory}
        losses = trained(model, DEVICE, rank, clips=not use_dtensor)
        parts = [getattr(p, "_local_tensor", p).detach().cpu() for p in model.parameters()]
        found.append(losses + parts)
    require_close(*found, 1e-4)
    stop()


@pytest.mark.parametrize("use_dtensor", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_function_offloads(use_dtensor, pin_memory):
    ranks.run(offloaded_by_the_function, 2, use_dtensor, pin_memory)


def written_by_the_script():
    """Nothing reads parameters behind these calls."""
    rank = start()
    from torch.distributed.fsdp import CPUOffloadPolicy

    device = torch.device(DEVICE, rank)
    one = models.wrap(models.build(), device_id=device, cpu_offload=True)
    policy = CPUOffloadPolicy()
    other = models.shard(models.build().to(DEVICE), use_dtensor=False, offload_policy=policy)
    summon = type(one).summon_full_params

    def summoned(model):
        with summon(model, writeback=False):
            pass

    def unsharded(model):
        model.unshard()
        model.reshard()

    def evaluated(model):
        with torch.no_grad():
            model(TOKENS[0].to(DEVICE))

    for model, calls in (
        (one, (type(one).state_dict, summoned, evaluated)),
        (other, (unsharded, evaluated)),
    ):
        for call in calls:
            call(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    stop()


def test_the_host_may_write_offloaded_parameters_behind_each_call():
    ranks.run(written_by_the_script, 2)


def from_the_host(offloads):
    """A model that is on the CPU goes where its mesh is, and to the device without one."""
    rank = start()
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
    plain = models.build()
    plain.register_buffer("shift", torch.ones(2))
    model = models.shard(plain, offload_policy=policy)
    assert model.shift.device == torch.device(DEVICE, rank)
    home = "cpu" if offloads else DEVICE
    assert {p.device.type for p in model.parameters()} == {home}
    assert {p.device_mesh.device_type for p in model.parameters()} == {DEVICE}
    on_host = models.shard(models.build(), mesh=host_mesh(2))
    assert {p.device.type for p in on_host.parameters()} == {"cpu"}
    on_both = trained(model, DEVICE, rank, False), trained(on_host, "cpu", rank, False)
    require_close(*on_both, 1e-4)
    stop()


@pytest.mark.parametrize("offloads", [False, True])
def test_a_model_on_the_host_goes_to_the_device(offloads):
    ranks.run(from_the_host, 2, offloads)


def accumulated():
    """Passes with and without synchronisation, evaluations, norms, and states of both kinds."""
    rank = start()
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP

    found = []
    for offloads in (True, False):
        device = torch.device(DEVICE, rank)
        model = models.wrap(models.build(), device_id=device, cpu_offload=offloads)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        results = []
        for step in range(2):
            optimizer.zero_grad()
            with model.no_sync():
                model(TOKENS[step].to(DEVICE))[1].backward()
            for batch in (step + 1, step + 2):
                model(TOKENS[batch].to(DEVICE))[1].backward()
            results.append(model.clip_grad_norm_(0.5).cpu())
            with torch.no_grad():
                results.append(model(TOKENS[0].to(DEVICE))[1].cpu())
            optimizer.step()
        full = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
        model.load_state_dict(model.state_dict())
        found.append(results + list(whole(model).values()))
    require_close(*found, 1e-4)
    stop()


def test_offloaded_parameters_accumulate():
    ranks.run(accumulated, 2)


def test_mistakes_are_named():
    ranks.run(mistakes, 2)


def scaled(offloads):
    rank = start()
    device = torch.device(DEVICE, rank)
    on_device = models.wrap(models.build(), device_id=device, cpu_offload=offloads)
    on_host = models.wrap(models.build())
    states = [train_scaled(on_device, DEVICE, rank), train_scaled(on_host, "cpu", rank)]
    require_close(*(state.values() for state in states), STEPS_OF_ROUNDING)
    stop()


def train_scaled(model, device, rank):
    """A step that one rank must skip, and one more; the parameters in the end."""
    from libddp.optim import AdamW

    optimizer = AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    before = whole(model)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(model(TOKENS[step].to(device))[1]).backward()
        if step == 0 and rank == 1:
            next(p for p in model.parameters() if p.numel()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(t, before[name]) for name, t in whole(model).items())
        assert changed == (step == 1), "the first step is skipped on both ranks"
        assert scaler.get_scale() == 4.0
    counts = {entries["step"].item() for entries in optimizer.state.values()}
    assert counts == {1.0}
    return whole(model)


@pytest.mark.parametrize("offloads", [False, True], ids=["device", "offloaded"])
def test_a_scaler_decides_for_all_ranks(offloads):
    ranks.run(scaled, 2, offloads)
