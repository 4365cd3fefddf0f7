"""Checkpointed blocks under libddp's FSDP: losses and weights of no checkpointing, to the bit."""

import itertools

import blocks
import pytest
import ranks
import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper


def train(model) -> list:
    """Losses of three steps and a loss of evaluation; the random numbers differ by rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3 + torch.distributed.get_rank())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, requires_grad=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(torch.ones(4, 8)).pow(2).mean().item())
    return found


def first_generation(where: str, form: str):
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp.wrap import ModuleWrapPolicy

    def shard(model, *classes):
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy(set(classes)))

    model = blocks.Stack()
    if where == "none":
        return shard(model, blocks.Block)
    if where == "inside, wrapped before":
        blocks.wrap(model, form)
        return shard(model, CheckpointWrapper)
    if where == "outside, wrapped before":
        blocks.wrap(model, form)
        return shard(model, blocks.Block)
    model = shard(model, blocks.Block)
    if where == "inside, wrapped after":
        blocks.wrap(model, form)
    elif where == "outside, wrapped after":
        blocks.wrap(model.module.blocks, form, FSDP)
    else:
        model.module.call = lambda block, x: blocks.FORMS[form](block, x)
    return model


def second_generation(where: str, form: str):
    from libddp.distributed.fsdp import fully_shard

    model = blocks.Stack()
    if where == "inside, wrapped before":
        blocks.wrap(model, form)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if where == "outside, wrapped after":
        blocks.wrap(model, form)
    elif where == "around the call":
        model.call = lambda block, x: blocks.FORMS[form](block, x)
    return model


FIRST = [
    "inside, wrapped before",
    "inside, wrapped after",
    "outside, wrapped before",
    "outside, wrapped after",
    "around the call",
]
SECOND = ["inside, wrapped before", "outside, wrapped after", "around the call"]


def all_forms_on_ranks() -> tuple[list, list]:
    """What differs from no checkpointing, and what the form of one node says outside of a unit."""
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("gloo")
    wrong, refused = [], []
    for make, places in ((first_generation, FIRST), (second_generation, SECOND)):
        plain = train(make("none", ""))
        for where, form in itertools.product(places, blocks.FORMS):
            if form == "module" and not where.startswith("inside"):
                with pytest.raises(ValueError) as raised:
                    make(where, form)(torch.ones(4, 8))
                refused.append(str(raised.value))
            elif train(make(where, form)) != plain:
                wrong.append((make.__name__, where, form))
    destroy_process_group()
    return wrong, refused


def test_all_forms_in_all_places():
    for wrong, refused in ranks.run(all_forms_on_ranks, 2):
        assert wrong == []
        assert len(refused) == 5
        for text in refused:
            assert "checkpoint_module" in text
            assert "is a unit of FSDP" in text
            assert "Hint: checkpoint inside of the unit" in text


def compiled(where: str):
    from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
    from libddp.distributed.fsdp import fully_shard
    from libddp.distributed.fsdp.wrap import ModuleWrapPolicy

    model = blocks.Stack(dropout=0.0)
    if "blocks" in where:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if "checkpointed" in where:
        blocks.wrap(model, "own graph")
    if "fully_shard" in where:
        for block in model.blocks:
            fully_shard(block)
        model = fully_shard(model)
    else:
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({blocks.Block}))
    return torch.compile(model, backend="aot_eager") if "whole" in where else model


def compiled_on_ranks() -> list:
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("gloo")
    plain = train(compiled("FSDP"))
    wrong = []
    for where in (
        "FSDP blocks",
        "FSDP blocks checkpointed",
        "FSDP whole",
        "FSDP whole checkpointed",
        "fully_shard blocks",
        "fully_shard blocks checkpointed",
        "fully_shard whole",
        "fully_shard whole checkpointed",
    ):
        torch._dynamo.reset()
        found = train(compiled(where))
        if found != plain:
            wrong.append((where, found, plain))
    destroy_process_group()
    return wrong


def test_compiled_before_and_after_it_is_sharded():
    assert ranks.run(compiled_on_ranks, 2) == [[], []]
