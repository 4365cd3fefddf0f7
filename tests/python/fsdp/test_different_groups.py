"""Units of one model over different groups of ranks: experts on a mesh of their own, HSDP beside.

Parameters exist once per host and group, so who changes its rows must wait for the ranks of each
unit. One rank is late in every step, and what each changes between the steps shows who has read
something else.
"""

import time

import checks
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn

STEPS = 4


class TwoLayers(nn.Module):
    """Both 4 x 4; with ones as input and weights a and b the sum of the outputs is 64 a b."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4, bias=False)
        self.expert = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.expert(self.attention(x))


def meshes():
    pairs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))
    return {"all": dist.init_device_mesh("cpu", (4,)), "pairs": pairs} | {
        name: pairs[name] for name in ("far", "near")
    }


def sums_of_steps(model, late, step):
    """Of each step on this rank, and right ones."""
    found = []
    for number in range(STEPS):
        if dist.get_rank() == late:
            time.sleep(0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                getattr(parameter, "to_local", lambda of=parameter: of)().fill_(float(number))
        found.append(step(model))
    return found, [64.0 * number**2 for number in range(STEPS)]


def trained(model):
    total = model(torch.ones(1, 4)).sum()
    total.backward()
    return total.item()


def evaluated(model):
    with torch.no_grad():
        return model(torch.ones(1, 4)).sum().item()


def check_by_the_function():
    from libddp.distributed.fsdp import fully_shard

    known = meshes()
    for child, root in (
        ("far", "all"),
        ("all", "far"),
        ("near", "far"),
        ("pairs", "all"),
        ("pairs", "near"),
        ("pairs", "pairs"),
    ):
        for step in (trained, evaluated):
            for late in (0, 1):
                model = TwoLayers()
                fully_shard(model.expert, mesh=known[child])
                fully_shard(model, mesh=known[root])
                found, wanted = sums_of_steps(model, late, step)
                assert found == wanted, (child, root, late, step)


def check_a_frozen_unit():
    """Its ranks meet at the end of a pass though the other unit has averages."""
    from libddp.distributed.fsdp import fully_shard

    known = meshes()
    for frozen in ("attention", "expert"):
        for late in (0, 3):
            model = TwoLayers()
            getattr(model, frozen).weight.requires_grad_(False)
            fully_shard(model.expert, mesh=known["far"])
            fully_shard(model, mesh=known["near"])
            found, wanted = sums_of_steps(model, late, trained)
            assert found == wanted, (frozen, late)


def check_by_the_class():
    wrapper = models.libddp_fsdp().FullyShardedDataParallel
    for late in (0, 2):
        model = TwoLayers()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model.expert = wrapper(model.expert, process_group=pairs[dist.get_rank() // 2])
        found, wanted = sums_of_steps(wrapper(model), late, trained)
        assert found == wanted, late


def check_copies_of_all_parameters():
    """summon_full_params: nobody goes on to change what another rank still copies."""
    package = models.libddp_fsdp()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = TwoLayers()
    model.expert = package.FullyShardedDataParallel(
        model.expert, process_group=pairs[dist.get_rank() // 2]
    )
    model = package.FullyShardedDataParallel(model)

    def copied(model):
        with package.FullyShardedDataParallel.summon_full_params(model):
            weights = [parameter.clone() for parameter in model.parameters()]
        return (weights[0] @ weights[1]).sum().item()

    found, wanted = sums_of_steps(model, 1, copied)
    assert found == wanted


results, test_on_all_ranks = checks.suite(globals(), 4)
