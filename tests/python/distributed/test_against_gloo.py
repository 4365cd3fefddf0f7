"""torch's libraries on libddp and on Gloo: one script, run once on each, the same numbers.

With two ranks a sum has one order, so that all bits must be equal. With four, libddp adds in the
order of the ranks and Gloo around a ring: results may differ by the rounding of float32, some 1e-7
of the summands in each of five steps.
"""

import importlib.util
import os
import shutil
import tempfile
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist

STEPS = 5
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
PARTS = ("ddp", "zero", "local_sgd", "fsdp2", "hsdp", "dtensor", "tensor_parallel")
PARTS += ("pipelines", "functions", "checkpoint", "accelerate")


def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(12, 40), torch.nn.GELU(), torch.nn.Linear(40, 7)]
    return torch.nn.Sequential(*layers)


def train(wrapped, optimizer, backward=torch.Tensor.backward):
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(torch.randn(6, 12)).pow(2).mean()
        backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def whole(tensor):
    """As on one device."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def run_ddp():
    wrapped = torch.nn.parallel.DistributedDataParallel(model())
    losses = train(wrapped, torch.optim.AdamW(wrapped.parameters(), 1e-2))
    return losses + [whole(p) for p in wrapped.parameters()]


def run_zero():
    """torch's ZeRO 1, over hooks of DDP's that compress."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    for in_buckets in (False, True):
        wrapped = torch.nn.parallel.DistributedDataParallel(model())
        state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=in_buckets, lr=1e-2
        )
        found += train(wrapped, optimizer)
        optimizer.consolidate_state_dict(0)
        found += [whole(p) for p in wrapped.parameters()]
    return found


def run_local_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    wrapped = torch.nn.parallel.DistributedDataParallel(model())
    state = local.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    wrapped.register_comm_hook(state, local.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    losses = train(wrapped, PostLocalSGDOptimizer(optimizer, averager))
    return losses + [whole(p) for p in wrapped.parameters()]


def sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = train(net, optimizer)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    return net, optimizer, [*losses, whole(norm), *[whole(p) for p in net.parameters()]]


def run_fsdp2():
    return sharded(dist.init_device_mesh("cpu", (dist.get_world_size(),)))[-1]


def run_hsdp():
    size = (2, dist.get_world_size() // 2)
    mesh = dist.init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))
    return sharded(mesh)[-1]


def run_dtensor():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    a, b = torch.randn(8, 12), torch.randn(12, 10)
    rows, columns = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    product = rows @ columns
    assert product.placements == (Partial(),)
    uneven = distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    return [
        product.redistribute(mesh, [Replicate()]).to_local(),
        whole(product.redistribute(mesh, [Shard(0)])),
        whole(rows.redistribute(mesh, [Shard(0)]) * 3),
        whole(uneven),
        whole(uneven.sum()),
    ]


def run_tensor_parallel():
    """Sequence, column, row and loss parallel."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.ReLU()]
    layers += [torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 12)]
    plan = {
        "0": tp.SequenceParallel(),
        "1": tp.ColwiseParallel(input_layouts=Shard(1)),
        "3": tp.RowwiseParallel(output_layouts=Shard(1)),
        "4": tp.SequenceParallel(),
        "5": tp.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    net = tp.parallelize_module(torch.nn.Sequential(*layers), mesh, plan)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        batch, targets = torch.randn(2, 2 * dist.get_world_size(), 8), torch.randint(12, (2,))
        part = batch.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        with tp.loss_parallel():
            loss = torch.nn.functional.cross_entropy(net(part)[:, 0], targets)
            loss.backward()
        found.append(whole(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(loss))
    return found + [whole(p) for p in net.parameters()]


def run_pipelines():
    """Schedules of one and of two stages a rank: batches of sends and receives both ways."""
    from torch.distributed import pipelining

    found = []
    for schedule, num_stages in (
        (pipelining.ScheduleGPipe, 1),
        (pipelining.Schedule1F1B, 1),
        (pipelining.ScheduleInterleaved1F1B, 2),
        (pipelining.ScheduleLoopedBFS, 2),
        (pipelining.ScheduleInterleavedZeroBubble, 2),
    ):
        found += pipeline(schedule, num_stages * dist.get_world_size())
    return found


def pipeline(schedule, size):
    """The losses, on the rank with the last stage, and the gradients of this rank's stages."""
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(size)]
    mine = range(dist.get_rank(), size, dist.get_world_size())
    stages = [PipelineStage(layers[i], i, size, torch.device("cpu")) for i in mine]

    def loss_of(output, target):
        return (output - target).square().mean()

    steps = schedule(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=2 * dist.get_world_size(),
        loss_fn=loss_of,
    )
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        batch, target = torch.randn(2, 16, 8)
        last = {"target": target, "losses": losses} if size - 1 in mine else {}
        steps.step(*([batch] if 0 in mine else []), **last)
    return [loss.detach() for loss in losses] + [
        parameter.grad for i in mine for parameter in layers[i].parameters()
    ]


def run_functions():
    """Those of torch.distributed.nn, and their gradients."""
    from torch.distributed.nn import functional

    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(size, 3, requires_grad=True)
    results = [
        functional.all_reduce(x * 2),
        torch.cat(functional.all_gather(x)),
        functional.all_to_all_single(torch.empty(size, 3), x * 3),
        functional.broadcast(x.clone(), size - 1),
        functional.reduce_scatter(torch.empty(size, 3), [x * i for i in range(size)]),
    ]
    sum((rank + 1) * result.square().sum() for result in results).backward()
    return [*[result.detach() for result in results], x.grad]


def run_checkpoint():
    """What is saved sharded comes back, in another model and as a whole."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    net, optimizer, _ = sharded(mesh)
    box = [tempfile.mkdtemp(prefix="dcp-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=box[0])
    other, its_optimizer, _ = sharded(mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    weights, states = get_state_dict(other, its_optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=box[0])
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=states)
    loaded = [whole(p) for p in other.parameters()]
    assert all(a.equal(whole(b)) for a, b in zip(loaded, net.parameters(), strict=True))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
    return loaded + train(other, its_optimizer)


def run_accelerate():
    if not HAS_ACCELERATE:
        return []
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(61, 12))
    net = model()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data, 4, shuffle=False)
    )
    seen = []
    for (batch,) in loader:
        with accelerator.accumulate(net):
            loss = net(batch).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(batch.sum(1)))
    assert sum(part.numel() for part in seen) == 61
    reduced = accelerator.reduce(loss.detach(), reduction="mean")
    return [*seen, reduced, *[whole(p) for p in net.parameters()]]


def run_parts(backend):
    import libddp.distributed  # noqa: F401 (registers the backend)

    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    assert dist.get_backend() == backend
    found = {}
    for part in PARTS:
        found[part] = [tensor.numpy() for tensor in globals()[f"run_{part}"]()]
        dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[2, 4])
def both(request):
    """World size; what each rank has on Gloo, and on libddp."""
    size = request.param
    return size, *(ranks.run(run_parts, size, backend) for backend in ("gloo", "libddp"))


@pytest.mark.parametrize("part", PARTS)
def test_libddp_gives_gloos_numbers(both, part):
    if part == "accelerate" and not HAS_ACCELERATE:
        pytest.skip("accelerate is not installed")
    size, gloo, ours = both
    tolerance = {"rtol": 0, "atol": 0} if size == 2 else {"rtol": 1e-5, "atol": 1e-6}
    for theirs, mine in zip(gloo, ours, strict=True):
        assert len(theirs[part]) > 1
        for expected, actual in zip(theirs[part], mine[part], strict=True):
            torch.testing.assert_close(
                torch.from_numpy(actual), torch.from_numpy(expected), **tolerance
            )
