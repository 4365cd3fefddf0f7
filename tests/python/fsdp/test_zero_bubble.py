"""Sharded pipeline stages under schedules that compute gradients of inputs and of weights apart.

Two pipelines of two ranks each, which share their weights: beside the whole model in one process
(torch 2.11's halves of plain stages count weights that are used twice too often).
"""

import checks
import fsdp_models as models
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

NUM_STAGES = 4
NUM_MICROBATCHES = 6
WIDTH = 8


class Part(torch.nn.Module):
    """A norm and a scale of its own, and two layers, of which the first one is used twice."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.first(torch.tanh(self.first(self.norm(x))))
        return x + self.last(torch.tanh(y)) * self.scale


def parts():
    torch.manual_seed(0)
    return [Part() for _ in range(NUM_STAGES)]


def mesh_of_all():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def stages_of(schedule, rank):
    """Of one rank of a pipeline."""
    from torch.distributed import pipelining

    if schedule is pipelining.ScheduleInterleavedZeroBubble:
        return [rank, rank + 2]
    return [rank, NUM_STAGES - 1 - rank]  # there and back


def batch_of(step, mesh):
    torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
    return torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH)


def loss_of(output, target):
    return (output - target).square().mean()


def trained(schedule, mesh, shard, num_steps=2):
    """The gradients of this rank's stages in each step."""
    from torch.distributed.pipelining import PipelineStage

    group = mesh.get_group("pp")
    own = parts()
    mine = stages_of(schedule, mesh.get_local_rank("pp"))
    stages = [
        PipelineStage(shard(own[i]), i, NUM_STAGES, torch.device("cpu"), group=group) for i in mine
    ]
    steps = schedule(stages, n_microbatches=NUM_MICROBATCHES, loss_fn=loss_of)
    weights = [p for i in mine for p in own[i].parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    found = []
    for step in range(num_steps):
        batch, target = batch_of(step, mesh)
        optimizer.zero_grad()
        steps.step(
            *([batch] if 0 in mine else []),
            **({"target": target} if NUM_STAGES - 1 in mine else {}),
        )
        found += [whole(p.grad).clone() for p in weights]
        optimizer.step()
    return found


def alone(schedule, mesh, num_steps=2):
    """The same of the whole model in one pass, averaged by hand."""
    own = parts()
    model = torch.nn.Sequential(*own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = stages_of(schedule, mesh.get_local_rank("pp"))
    found = []
    for step in range(num_steps):
        batch, target = batch_of(step, mesh)
        optimizer.zero_grad()
        loss_of(model(batch), target).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, mesh.get_group("dp"))
        found += [p.grad.clone() for i in mine for p in own[i].parameters()]
        optimizer.step()
    return found


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def sharding(mesh, fully_shard=None, **options):
    fully_shard = fully_shard or models.libddp_fsdp().fully_shard

    def shard(part):
        fully_shard(part.first, mesh=mesh["dp"], **options)
        fully_shard(part.last, mesh=mesh["dp"], **options)
        return fully_shard(part, mesh=mesh["dp"], **options)

    return shard


def schedules():
    from torch.distributed import pipelining

    return [
        pipelining.ScheduleInterleavedZeroBubble,
        pipelining.ScheduleZBVZeroBubble,
        pipelining.ScheduleDualPipeV,
    ]


def check_gradients_are_those_of_one_process():
    mesh = mesh_of_all()
    for schedule in schedules():
        wanted = alone(schedule, mesh)
        for reshard in (True, False):
            found = trained(schedule, mesh, sharding(mesh, reshard_after_forward=reshard))
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, msg=f"{schedule.__name__} {reshard}")


def check_with_torchs_names():
    """The stage tells the module itself when to average."""
    import libddp

    mesh = mesh_of_all()
    wanted = {schedule: alone(schedule, mesh) for schedule in schedules()}
    libddp.install()
    try:
        for schedule, gradients in wanted.items():
            shard = sharding(mesh, fully_shard=torch.distributed.fsdp.fully_shard)
            for one, other in zip(trained(schedule, mesh, shard), gradients, strict=True):
                torch.testing.assert_close(one, other, msg=schedule.__name__)
    finally:
        libddp.uninstall()


def check_low_precision():
    """Gradients of microbatches are added up in float32."""
    mesh, (schedule, *_) = mesh_of_all(), schedules()
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    wanted = alone(schedule, mesh, num_steps=1)
    found = trained(schedule, mesh, sharding(mesh, mp_policy=policy), num_steps=1)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)


def check_parameters_that_are_not_sharded():
    mesh, (schedule, *_) = mesh_of_all(), schedules()

    def shard(part):
        scale = {part.scale}
        return models.libddp_fsdp().fully_shard(part, mesh=mesh["dp"], ignored_params=scale)

    found = trained(schedule, mesh, shard, num_steps=1)
    wanted = alone(schedule, mesh, num_steps=1)
    names = [name for _ in range(2) for name, _ in Part().named_parameters()]
    for name, one, other in zip(names, found, wanted, strict=True):
        if name == "scale":  # nobody averages it
            dist.all_reduce(one, dist.ReduceOp.AVG, mesh.get_group("dp"))
        torch.testing.assert_close(one, other)


def check_recomputed_parts():
    from torch.utils.checkpoint import checkpoint

    mesh, (schedule, *_) = mesh_of_all(), schedules()
    shard = sharding(mesh)

    def recomputing(part):
        forward = part.forward
        part.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        return shard(part)

    found = trained(schedule, mesh, recomputing, num_steps=1)
    wanted = alone(schedule, mesh, num_steps=1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


results, test_on_four_ranks = checks.suite(globals(), 4)
