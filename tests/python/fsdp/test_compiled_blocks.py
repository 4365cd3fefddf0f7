"""Blocks that torch.compile has compiled, in a sharded model whose gradients are there already."""

import checks
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def losses(prepare, wrap) -> list[float]:
    """Of steps with two passes each, and of evaluations while gradients are there."""
    torch._dynamo.reset()
    model = wrap(prepare(models.build()))
    optimizer = models.adamw(model.parameters())
    found = []

    def evaluate():
        with torch.no_grad():
            found.append(model(models.tokens(100))[1].item())

    for step in range(3):
        for micro in range(2):
            loss = model(models.tokens(2 * step + micro))[1]
            loss.backward()
            found.append(loss.item())
            evaluate()
        for parameter in model.parameters():
            assert parameter.grad.shape == parameter.shape
        optimizer.step()
        evaluate()
        optimizer.zero_grad()
    return found


def same_losses(prepare, wrap):
    found, wanted = losses(prepare, wrap), losses(lambda model: model, wrap)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def check_class_over_blocks_compiled_in_place():
    same_losses(compiled_in_place, models.wrap)


def check_fully_shard_over_blocks_compiled_in_place():
    same_losses(compiled_in_place, models.shard)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale=None):
        return torch.relu(self.layer(x)) * (1 if scale is None else scale)


def check_inputs_that_a_collective_still_writes():
    """The gradient of the tensor-parallel layer before the block is that without compilation."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        embedding, block = nn.Embedding(16, 4), Perceptron()
        parallelize_module(embedding, mesh, plan)
        if compiled:
            block.compile(backend="aot_eager")
        models.libddp_fsdp().fully_shard(block, mesh=mesh)
        tokens = torch.arange(4).view(2, 2)
        block(embedding(tokens), scale=embedding(tokens + 4)).pow(2).sum().backward()
        found.append(embedding.weight.grad.full_tensor())
    assert found[0].count_nonzero() > 16
    torch.testing.assert_close(found[1], found[0])


results, test_on_all_ranks = checks.suite(globals(), 2)
