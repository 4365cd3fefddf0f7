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
PARTS = ("ddp", "fsdp2", "hsdp", "dtensor", "checkpoint", "accelerate")


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
