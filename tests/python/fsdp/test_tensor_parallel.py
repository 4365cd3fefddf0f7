"""fully_shard of models that are tensor-parallel already, on a mesh of two dimensions."""

from itertools import product

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def mesh_of():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallel(fully_shard, mesh, seed=3):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(seed)
    model = nn.Sequential(Mlp(), Mlp())
    for mlp in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(mlp, mesh["tp"], plan)
        fully_shard(mlp, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def batch(step, mesh):
    """Ranks of one tensor-parallel group have the same."""
    generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
    return torch.randn(4, 8, generator=generator)


def train(model, mesh, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(batch(step, mesh)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def both():
    from torch.distributed.fsdp import fully_shard as torchs

    mesh = mesh_of()
    ours = parallel(models.libddp_fsdp().fully_shard, mesh)
    return ours, parallel(torchs, mesh), mesh


def check_training_is_torchs():
    ours, theirs, mesh = both()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert mine.placements == other.placements
        assert mine.device_mesh.mesh_dim_names == other.device_mesh.mesh_dim_names
        assert torch.equal(mine.to_local(), other.to_local())
    assert train(ours, mesh, 3) == train(theirs, mesh, 3)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())
        torch.testing.assert_close(mine.full_tensor(), other.full_tensor(), rtol=0, atol=0)


def check_checkpoints():
    folder = checks.shared_folder()
    ours, _, mesh = both()
    train(ours, mesh, 2)
    dcp.save({"model": ours.state_dict()}, checkpoint_id=folder)
    again = parallel(models.libddp_fsdp().fully_shard, mesh, seed=9)
    state = again.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    again.load_state_dict(state)
    for mine, other in zip(again.parameters(), ours.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())
    assert train(again, mesh, 1, first=2) == train(ours, mesh, 1, first=2)


def check_a_mesh_that_is_the_same():
    mesh = mesh_of()
    from torch.distributed.tensor import distribute_tensor

    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["dp"]))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor on .*Hint: make one mesh"):
        models.libddp_fsdp().fully_shard(layer, mesh=mesh["dp"])


def check_norms_of_sequences_in_low_precision():
    """Their gradients are parts of sums, which torch adds up in one dtype or another by version."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh = mesh_of()
    low = torch.bfloat16
    # An RMSNorm's backward gives gradients of its weight in float32.
    norms = (nn.LayerNorm, nn.RMSNorm)
    for norm, param, reduce in product(norms, (low, None), (torch.float32, None, low)):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        found = []
        for fully_shard in (models.libddp_fsdp().fully_shard, torchs):
            model = nn.Sequential(norm(8))
            parallelize_module(model, mesh["tp"], {"0": SequenceParallel(sequence_dim=0)})
            fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
            torch.manual_seed(5 + mesh.get_local_rank("dp"))
            for _ in range(2):
                x, weight = torch.randn(64, 8), torch.randn(64, 8).to(low)
                y = model(distribute_tensor(x, mesh["tp"], [Shard(0)]))
                (y * distribute_tensor(weight, mesh["tp"], [Shard(0)])).sum().backward()
            found.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        for mine, other in zip(*found, strict=True):
            assert torch.equal(mine, other), (norm, param, reduce)


results, test_on_four_ranks = checks.suite(globals(), 4)
