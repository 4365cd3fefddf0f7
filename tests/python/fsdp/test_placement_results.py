"""shard_placement_fn that names other ranks for some parameters of a module, as torch's."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.skipif(
    not hasattr(common, "ShardPlacementResult"), reason="this torch has no ShardPlacementResult"
)


class Block(nn.Module):
    """Half of the experts are on each rank of "ep"; the rest is the same on all ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.Parameter(torch.empty(4, 8, 8))
        self.router = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(4, 8))
        self.init_weights()

    def init_weights(self):
        for layer in (self.norm, self.router):
            layer.reset_parameters()
        nn.init.normal_(self.experts, std=0.3)
        nn.init.zeros_(self.bias)

    def distribute(self, mesh):
        for name in ("experts", "bias"):
            placed = distribute_tensor(getattr(self, name).detach(), mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(placed))
        self.own = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)

    def forward(self, x):
        x = self.norm(x)
        weights = self.router(x).softmax(-1)[:, self.own]
        experts, bias = self.experts.to_local(), self.bias.to_local()
        return x + (torch.einsum("bi,eio->beo", x, experts) + bias).mul(weights.unsqueeze(-1)).sum(
            1
        )

    def expert_parameters(self):
        return {self.experts, self.bias}


class Meshes:
    def __init__(self):
        whole = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        self.all = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        self.few, self.experts = whole["edp"], whole["ep"]
        self.all_info = common.FSDPMeshInfo(self.all, shard_mesh_dim=0)
        self.few_info = common.FSDPMeshInfo(self.few, shard_mesh_dim=0)

    def placing(self, block, dim=0):
        experts = block.expert_parameters()

        def place(parameter):
            if parameter in experts:
                return common.ShardPlacementResult(Shard(dim), self.few_info)
            return common.ShardPlacementResult(Shard(0), self.all_info)

        return place

    def sharded(self, fully_shard, dim=0, device="cpu", **options):
        torch.manual_seed(3)
        with torch.device(device):
            model = nn.Sequential(Block(), nn.Linear(8, 8), Block())
        for block in (model[0], model[2]):
            block.distribute(self.experts)
            place = self.placing(block, dim)
            fully_shard(block, mesh=self.all, shard_placement_fn=place, **options)
        return fully_shard(model, mesh=self.all, **options)


def train(model, steps=3, passes=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    return [step(model, optimizer, number, passes) for number in range(steps)]


def step(model, optimizer, number, passes=1):
    """Losses of its passes."""
    losses = []
    optimizer.zero_grad()
    for part in range(passes):
        generator = torch.Generator().manual_seed(100 * number + 10 * part + dist.get_rank())
        model.set_requires_gradient_sync(part == passes - 1)
        loss = model(torch.randn(6, 8, generator=generator)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return losses


def both(**options):
    meshes = Meshes()
    ours = meshes.sharded(models.libddp_fsdp().fully_shard, **options)
    return ours, meshes.sharded(torchs, **options)


def check_training_is_torchs():
    for options in ({}, {"reshard_after_forward": False}):
        ours, theirs = both(**options)
        assert train(ours) == train(theirs)
        models.assert_same_dtensors(ours, theirs)


def check_passes_that_add_up_and_divisors():
    # torch's Gloo takes no factor but with sums.
    ours, theirs = both()
    for module in theirs.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    for model in (ours, theirs):
        model[0].set_gradient_divide_factor(1.0)
    assert train(ours, passes=2) == train(theirs, passes=2)
    models.assert_same_dtensors(ours, theirs)


def check_experts_cut_on_another_dimension():
    ours, theirs = both(dim=1)
    torch.testing.assert_close(train(ours), train(theirs), rtol=1e-6, atol=0)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.placements == other.placements
        torch.testing.assert_close(mine.to_local(), other.to_local(), rtol=1e-4, atol=1e-5)


def check_meta_device():
    ours, theirs = both(device="meta")
    for model in (ours, theirs):
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for part in model:
            part.init_weights() if isinstance(part, Block) else part.reset_parameters()
        for parameter in model.parameters():  # torch draws each rank's rows by themselves
            with torch.no_grad():
                parameter.to_local().fill_(0.1)
    assert train(ours) == train(theirs)
    models.assert_same_dtensors(ours, theirs)


def check_unshard_and_state_dicts():
    ours, _ = both()
    train(ours, 1)
    block, whole = ours[0], ours[0].experts.full_tensor()
    block.unshard()
    assert not isinstance(block.router.weight, DTensor)
    assert torch.equal(block.experts.to_local(), whole[block.own])
    state = ours.state_dict()  # ends unshard
    assert block.experts.device_mesh.ndim == 2
    again = Meshes().sharded(models.libddp_fsdp().fully_shard)
    again.load_state_dict(state)
    for mine, other in zip(again.parameters(), ours.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local())


def check_checkpoints_go_both_ways():
    """What torch's models save, optimizers' states too, libddp's load, and go on alike."""
    ours, theirs = both()
    folder = checks.shared_folder()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (ours, theirs)]
    for saving, loading in ((theirs, ours), (ours, theirs)):
        pairs = dict(zip((ours, theirs), optimizers, strict=True))
        step(saving, pairs[saving], 0)
        dcp.save(states(saving, pairs[saving]), checkpoint_id=f"{folder}/{type(saving).__name__}")
        state = states(loading, pairs[loading])
        dcp.load(state, checkpoint_id=f"{folder}/{type(saving).__name__}")
        set_state_dict(
            loading,
            pairs[loading],
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        assert step(saving, pairs[saving], 1) == step(loading, pairs[loading], 1)
        models.assert_same_dtensors(ours, theirs)


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def check_refusals():
    fully_shard, meshes = models.libddp_fsdp().fully_shard, Meshes()
    blocks = [Block(), Block()]
    with pytest.raises(ValueError, match="different meshes for parameters of Block, Block"):
        fully_shard(blocks, mesh=meshes.all, shard_placement_fn=meshes.placing(blocks[0]))
    block = Block()
    wrong = common.ShardPlacementResult(Shard(0), meshes.all)
    with pytest.raises(ValueError, match=r"'experts'. Hint: torch's FSDPMeshInfo"):
        fully_shard(block, mesh=meshes.all, shard_placement_fn=lambda _: wrong)
    model = meshes.sharded(fully_shard)
    with pytest.raises(ValueError, match=r"rejoin\(\): unit 'Block' has parameters"):
        model.rejoin()


def check_a_forward_that_fails():
    ours, other = (Meshes().sharded(models.libddp_fsdp().fully_shard) for _ in range(2))
    with pytest.raises(RuntimeError):
        ours(torch.randn(6, 9))
    assert train(ours, 2) == train(other, 2)


results, test_on_four_ranks = checks.suite(globals(), 4)
