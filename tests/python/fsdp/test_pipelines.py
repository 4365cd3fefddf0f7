"""Pipeline stages that are sharded or replicated: whole passes work, halves are refused."""

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from libddp.errors import ArgumentError

NUM_STAGES = 4
NUM_RANKS = 2


def layers():
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        for _ in range(NUM_STAGES)
    ]


def step(schedule, shard):
    """The gradients of this rank's stages, each of which the rank shards with itself alone."""
    from torch.distributed.pipelining import PipelineStage

    parts = layers()
    mine = range(dist.get_rank(), NUM_STAGES, NUM_RANKS)
    stages = [PipelineStage(shard(parts[i]), i, NUM_STAGES, torch.device("cpu")) for i in mine]
    steps = schedule(
        stages, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    torch.manual_seed(1)
    batch, target = torch.randn(2, 16, 8)
    steps.step(
        *([batch] if 0 in mine else []), **({"target": target} if NUM_STAGES - 1 in mine else {})
    )
    return [p.grad for i in mine for p in parts[i].parameters()]


def check_whole_passes_train():
    from torch.distributed import pipelining

    meshes = [dist.DeviceMesh("cpu", [rank]) for rank in range(NUM_RANKS)]
    mesh = meshes[dist.get_rank()]

    def shard(part):
        return models.libddp_fsdp().fully_shard(part, mesh=mesh)

    schedule = pipelining.ScheduleInterleaved1F1B
    for found, wanted in zip(step(schedule, shard), step(schedule, lambda m: m), strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted)


def check_halves_of_passes_are_refused():
    from torch.distributed.pipelining import PipelineStage

    fsdp = models.libddp_fsdp()
    sharded = fsdp.fully_shard(layers()[0])
    wrapped = fsdp.FullyShardedDataParallel(layers()[0])
    replicated = ddp_models.wrap(layers()[0])
    for module, what in (
        (torch.nn.Sequential(sharded), "Sequential, is sharded,"),
        (wrapped, "FullyShardedDataParallel, is sharded,"),
        (replicated, "DistributedDataParallel, is in DistributedDataParallel,"),
        (torch.nn.Sequential(replicated), "Sequential, is in DistributedDataParallel,"),
    ):
        stage = PipelineStage(module, dist.get_rank(), NUM_RANKS, torch.device("cpu"))
        # What the schedules call; a step would leave messages to other stages behind.
        with pytest.raises(ArgumentError, match=rf"{what} .* \(zero bubble\)"):
            stage.backward_maybe_with_nosync("input", {})


results, test_on_two_ranks = checks.suite(globals(), NUM_RANKS)
