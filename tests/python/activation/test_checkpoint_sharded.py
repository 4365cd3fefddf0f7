"""Checkpointed blocks under libddp's FSDP: losses and weights of no checkpointing, to the bit."""

import itertools

import blocks
import pytest
import ranks
import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch import nn


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


def all_forms_on_ranks(hosts: bool) -> tuple[list, list]:
    """What differs from no checkpointing, and what the form of one node says outside of a unit.

    With `hosts` each rank is on a host of its own, where units are gathered and given back.
    """
    if hosts:
        ranks.live_apart()
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


@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "gathered"])
def test_all_forms_in_all_places(hosts):
    for wrong, refused in ranks.run(all_forms_on_ranks, 2, hosts):
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


class Repeated(nn.Module):
    """One block that runs several times, as in ALBERT."""

    def __init__(self, width: int, call, is_first_frozen: bool):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, width)
        self.block = blocks.Block(width)
        self.head = nn.Linear(width, 1)
        self.embedding.requires_grad_(not is_first_frozen)
        self.call = call

    def forward(self, x):
        x = self.embedding(x)
        if not x.requires_grad:
            x.requires_grad_()
        for _ in range(3):
            x = self.call(self.block, x)
        return self.head(x)


def repeated_block_on_ranks(form: str) -> list:
    """Largest differences from the form that brings all gradients at once."""
    from libddp.distributed import destroy_process_group, init_process_group
    from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from libddp.distributed.fsdp.wrap import ModuleWrapPolicy

    def by_class(model):
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({blocks.Block}))

    def whole(model):
        return FullyShardedDataParallel(model)

    def by_block(model):
        fully_shard(model.block)
        return fully_shard(model)

    def gradients(width, shard, is_frozen, form):
        model = shard(Repeated(width, blocks.FORMS[form], is_frozen))
        torch.manual_seed(3 + torch.distributed.get_rank())
        for _ in range(2):  # the second pass adds to the first
            model(torch.randn(4, 8)).pow(2).mean().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [getattr(g, "_local_tensor", g).clone() for g in found]

    init_process_group("gloo")
    found = []
    # A unit of 64 KiB is averaged with others, one of 1 MiB by itself.
    for width, shard, is_frozen in itertools.product(
        (8, 256), (by_class, whole, by_block), (False, True)
    ):
        plain = gradients(width, shard, is_frozen, "own graph")
        again = gradients(width, shard, is_frozen, form)
        assert len(plain) == len(again) > 0
        found += [
            ((a - b).abs().max() / b.abs().max()).item()
            for a, b in zip(again, plain, strict=True)
            if b.numel()
        ]
    destroy_process_group()
    return found


def test_a_block_that_runs_several_times_brings_gradients_several_times():
    """Averages of each run are added, so sums have another order than an average of the sum."""
    for found in ranks.run(repeated_block_on_ranks, 2, "reentrant"):
        assert max(found) < 1e-5, found
