"""Checkpointed blocks under DistributedDataParallel, and compiled."""

import blocks
import pytest
import ranks
import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from libddp.utils.checkpoint import checkpoint
from torch import nn


def compare_on_ranks():
    from libddp.distributed import destroy_process_group, init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("gloo")
    gloo = torch.distributed.new_group(backend="gloo")

    def run(impl=None, wrap=DistributedDataParallel, **arguments):
        model = blocks.TwoHeads()
        if impl is not None:
            apply_activation_checkpointing(
                model,
                lambda m: checkpoint_wrapper(m, impl),
                lambda m: isinstance(m, blocks.Block),
            )
        return blocks.train(wrap(model, **arguments))

    def theirs(model, **arguments):
        return nn.parallel.DistributedDataParallel(model, process_group=gloo, **arguments)

    plain = run(find_unused_parameters=True)
    same = []
    for impl, arguments in (
        (CheckpointImpl.NO_REENTRANT, {"find_unused_parameters": True}),
        (CheckpointImpl.NO_REENTRANT, {"find_unused_parameters": True, "wrap": theirs}),
        (CheckpointImpl.NO_REENTRANT, {"static_graph": True}),
        (CheckpointImpl.NO_REENTRANT, {"static_graph": True, "gradient_as_bucket_view": True}),
    ):
        same.append(all(map(torch.equal, run(impl, **arguments), plain)))
    destroy_process_group()
    return same


def test_ddp_with_unused_parameters_and_static_graph():
    assert ranks.run(compare_on_ranks, 2) == [[True] * 4] * 2


def losses(model) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3 + torch.distributed.get_rank())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def compare_sharded():
    from libddp.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (2,))

    def first_generation(model):
        policy = ModuleWrapPolicy({blocks.Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id="cpu")

    def second_generation(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def checkpointed(model):
        is_block = lambda m: isinstance(m, blocks.Block)  # noqa: E731
        apply_activation_checkpointing(model, checkpoint_wrapper, is_block)
        return model

    same = [
        losses(checkpointed(shard(blocks.TwoHeads()))) == losses(shard(blocks.TwoHeads()))
        for shard in (first_generation, second_generation)
    ]
    same.append(
        losses(first_generation(checkpointed(blocks.TwoHeads())))
        == losses(first_generation(blocks.TwoHeads()))
    )
    destroy_process_group()
    return same


def test_torchs_fsdp():
    """Checkpointed after it was sharded, and before."""
    assert ranks.run(compare_sharded, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_around_the_checkpoint(backend):
    torch._dynamo.reset()
    plain = blocks.Stack(dropout=0.0)
    model = blocks.Stack(
        call=lambda block, x: checkpoint(block, x, use_reentrant=False), dropout=0.0
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    blocks.assert_equal(blocks.step(compiled), blocks.step(plain))


def test_a_compiled_block_within_the_checkpoint():
    torch._dynamo.reset()
    plain = blocks.Stack(dropout=0.0)
    model = blocks.Stack(dropout=0.0)
    compiled = {block: torch.compile(block, backend="aot_eager") for block in model.blocks}
    model.call = lambda block, x: checkpoint(compiled[block], x, use_reentrant=False)
    blocks.assert_equal(blocks.step(model), blocks.step(plain))
