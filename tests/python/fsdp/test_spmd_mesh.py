"""fully_shard(dp_mesh_dims=...): parameters on one mesh of all dimensions, as torch's."""

from functools import cache

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torchs, "DataParallelMeshDims"), reason="this torch has no DataParallelMeshDims"
)

#: Dimensions of the mesh of 4 ranks, and what they are for.
MESHES = {
    "rows": ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    "rows inside": ({"tp": 2, "dp": 2}, {"shard": "dp"}),
    "without tensor parallelism": ({"dp": 4}, {"shard": "dp"}),
    "two that shard": ({"dp": 2, "cp": 2, "tp": 1}, {"shard": ("dp", "cp")}),
    "replicas of rows": ({"outer": 2, "dp": 2}, {"shard": "dp", "replicate": "outer"}),
    "replicas": ({"outer": 2, "tp": 2}, {"replicate": "outer"}),
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def mesh_of(sizes: dict):
    """One object for equal ones: torch asks whether it is the same that parameters are on."""
    return _mesh_of(tuple(sizes.items()))


@cache
def _mesh_of(sizes: tuple):
    names, numbers = zip(*sizes, strict=True)
    return dist.init_device_mesh("cpu", numbers, mesh_dim_names=names)


def names_in(dims: dict) -> set[str]:
    """Of dimensions that are data-parallel."""
    return {n for value in dims.values() for n in ([value] if isinstance(value, str) else value)}


def cut_of(name: str) -> int | None:
    """The dimension of a weight that tensor parallelism cuts."""
    if name.startswith("norm"):
        return None
    return 1 if name.startswith("down") else 0


def placements(mesh, cut, batch=()):
    """`cut` on "tp"; `batch`: on these dimensions a batch is cut."""
    shards = {name: Shard(0) for name in batch}
    if cut is not None:
        shards["tp"] = Shard(cut)
    return [shards.get(name, Replicate()) for name in mesh.mesh_dim_names]


def on_mesh(model, mesh):
    def place(name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            where = placements(mesh, cut_of(f"{name.rpartition('.')[2]}.{key}"))
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, where)))

    return distribute_module(model, mesh, place)


def sharded(fully_shard, mesh, dims, **options):
    torch.manual_seed(3)
    model = nn.Sequential(Mlp(), Mlp())
    for mlp in model:
        on_mesh(mlp, mesh)
    return shard_parts(fully_shard, model, mesh, dims, divisor=1.0, **options)


def shard_parts(fully_shard, model, mesh, dims, divisor=None, **options):
    options |= {"mesh": mesh, "dp_mesh_dims": torchs.DataParallelMeshDims(**dims)}
    for part in (*model, model):
        fully_shard(part, **options)
        if divisor is not None:
            part.set_gradient_divide_factor(divisor)
    return model


def train(model, mesh, dims):
    """Losses and norms of gradients; ranks that are data-parallel have parts of one batch."""

    def batch(step):
        whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        return distribute_tensor(whole, mesh, placements(mesh, None, names_in(dims)))

    return [(loss.full_tensor().item(), norm) for loss, norm in steps(model, batch)]


def steps(model, batch):
    """Loss and norm of gradients of each; `batch(step)`: what the model is given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss.detach(), norm.full_tensor().item()


def check_training_is_torchs():
    for case, (sizes, dims) in MESHES.items():
        mesh = mesh_of(sizes)
        ours = sharded(models.libddp_fsdp().fully_shard, mesh, dims)
        theirs = sharded(torchs.fully_shard, mesh, dims)
        assert train(ours, mesh, dims) == train(theirs, mesh, dims), case
        models.assert_same_dtensors(ours, theirs)


def check_low_precision_is_torchs():
    sizes, dims = MESHES["rows"]
    mesh = mesh_of(sizes)
    for reduce in (None, torch.float32, torch.bfloat16):
        policy = torchs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        ours = sharded(models.libddp_fsdp().fully_shard, mesh, dims, mp_policy=policy)
        theirs = sharded(torchs.fully_shard, mesh, dims, mp_policy=policy)
        assert train(ours, mesh, dims) == train(theirs, mesh, dims), reduce
        models.assert_same_dtensors(ours, theirs)


def check_other_dimensions():
    """Weights that are cut on dim 1 are views with other strides while they are whole, so that
    products add up in another order.
    """
    sizes, dims = MESHES["rows"]
    mesh = mesh_of(sizes)
    options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}
    ours = sharded(models.libddp_fsdp().fully_shard, mesh, dims, **options)
    theirs = sharded(torchs.fully_shard, mesh, dims, **options)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.placements == other.placements
        assert torch.equal(mine.to_local(), other.to_local())
    mine, other = (torch.tensor(train(model, mesh, dims)) for model in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=0)


def check_wrong_arguments():
    fully_shard = models.libddp_fsdp().fully_shard
    mesh = mesh_of({"dp": 2, "tp": 2})
    dims = torchs.DataParallelMeshDims(shard="dp")

    def refuses(match, module=None, **options):
        with pytest.raises(ValueError, match=match):
            fully_shard(on_mesh(Mlp(), mesh) if module is None else module, **options)

    refuses("without a mesh", dp_mesh_dims=dims)
    refuses("DataParallelMeshDims, .*not a dict", mesh=mesh, dp_mesh_dims={"shard": "dp"})
    other = torchs.DataParallelMeshDims(shard="fsdp")
    refuses("'fsdp' not found", mesh=mesh, dp_mesh_dims=other)
    refuses("'norm.weight': .*plain tensor", Mlp(), mesh=mesh, dp_mesh_dims=dims)
    on_dp = distribute_module(nn.Linear(4, 4), mesh["dp"])
    refuses("'weight': .*different mesh objects", on_dp, mesh=mesh, dp_mesh_dims=dims)
    cut = nn.Linear(4, 4, bias=False)
    cut.weight = nn.Parameter(distribute_tensor(cut.weight, mesh, [Shard(0), Replicate()]))
    refuses(r"'weight': Expected Replicate\(\)", cut, mesh=mesh, dp_mesh_dims=dims)
    refuses("needs DTensors", mesh=mesh, dp_mesh_dims=dims, use_dtensor=False)


class Annotated(nn.Module):
    """Column- and row-parallel layers on plain tensors, which say so to spmd_types."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8 // self.parts * 2)
        self.down = nn.Linear(8 // self.parts * 2, 8, bias=False)

    @property
    def parts(self):
        return self.mesh["tp"].size()

    def annotate(self):
        import spmd_types as spmd

        def assert_types(parameter, on_tp):
            types = {name: spmd.R for name in self.mesh.mesh_dim_names} | {"tp": on_tp}
            groups = {self.mesh.get_group(name): kind for name, kind in types.items()}
            spmd.assert_type(parameter, groups)

        for parameter in self.norm.parameters():
            assert_types(parameter, spmd.R)
        for parameter in self.up.parameters():
            assert_types(parameter, spmd.S(0))
        assert_types(self.down.weight, spmd.S(1))
        return self

    def forward(self, x):
        tp = self.mesh.get_group("tp")
        # Each rank of "tp" has a part of the sum: gradients of the norm are parts, too.
        part = self.down(torch.relu(self.up(self.norm(x))))
        return x + all_reduce(part, group=tp)


def annotated(fully_shard, mesh, dims, **options):
    torch.manual_seed(3)
    model = nn.Sequential(Annotated(mesh), Annotated(mesh))
    generator = torch.Generator().manual_seed(mesh.get_local_rank("tp"))
    for part in model:
        for layer in (part.up, part.down):
            nn.init.normal_(layer.weight, std=0.3, generator=generator)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=0.3, generator=generator)
        part.annotate()
    return shard_parts(fully_shard, model, mesh, dims, **options)


def train_annotated(model, mesh, dims):
    """The same; each rank that is data-parallel has a batch of its own."""

    def batch(step):
        shift = sum(mesh.get_local_rank(n) << i for i, n in enumerate(sorted(names_in(dims))))
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + shift))

    return [(loss.item(), norm) for loss, norm in steps(model, batch)]


def check_annotated_parameters():
    pytest.importorskip("spmd_types")
    fully_shard = models.libddp_fsdp().fully_shard
    for sizes, dims in (
        ({"dp": 2, "tp": 2}, {"shard": "dp"}),
        ({"outer": 1, "dp": 2, "tp": 2}, {"shard": "dp", "replicate": "outer"}),
        ({"dp": 2, "tp": 2}, {"replicate": "dp"}),
    ):
        mesh = mesh_of(sizes)
        for param, reduce in ((None, None), (torch.bfloat16, torch.float32)):
            policy = torchs.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
            ours = annotated(fully_shard, mesh, dims, mp_policy=policy)
            theirs = annotated(torchs.fully_shard, mesh, dims, mp_policy=policy)
            assert train_annotated(ours, mesh, dims) == train_annotated(theirs, mesh, dims), sizes
            models.assert_same_dtensors(ours, theirs)
    with pytest.raises(ValueError, match=r"'norm.weight' has annotations .* dp should come first"):
        annotated(fully_shard, mesh_of({"tp": 2, "dp": 2}), {"shard": "dp"})
    with pytest.raises(ValueError, match=r"'norm.weight' has annotations of spmd_types"):
        fully_shard(Annotated(mesh).annotate(), mesh=mesh["dp"])


results, test_on_four_ranks = checks.suite(globals(), 4)
