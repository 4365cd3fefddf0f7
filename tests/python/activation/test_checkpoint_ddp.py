"""Checkpointed blocks under libddp's DDP: weights of no checkpointing, errors on every rank."""

import blocks
import pytest
import ranks
import torch


def all_forms_on_ranks() -> list:
    from libddp.distributed import destroy_process_group, init_process_group
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("gloo")
    wrong = []
    for unused in (False, True):

        def run(form=None, unused=unused):
            model = blocks.TwoHeads(unused)
            if form is not None:
                blocks.wrap(model, form)
            wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
            return blocks.train(wrapped, input_grad=True)

        plain = run()
        for form in blocks.FORMS:
            if not all(map(torch.equal, run(form), plain)):
                wrong.append((form, unused))
    destroy_process_group()
    return wrong


def test_all_forms_with_and_without_unused_parameters():
    assert ranks.run(all_forms_on_ranks, 2) == [[], []]


class Unsteady(blocks.Block):
    """Gives another shape in its second run, or changes its input."""

    def __init__(self, how: str):
        super().__init__(dropout=0.0)
        self.how, self.runs = how, 0

    def forward(self, x):
        self.runs += 1
        if self.how == "other shapes":
            return super().forward(x[:2] if self.runs == 2 else x)
        y = super().forward(x)
        with torch.no_grad():
            x.mul_(2)
        return y


def unsteady_on_rank(how: str, form: str, wrap: str) -> None:
    """Rank 1's block is not fit to be checkpointed; nobody catches the error."""
    from libddp.distributed import init_process_group
    from libddp.distributed.fsdp import FullyShardedDataParallel
    from libddp.nn.parallel import DistributedDataParallel

    init_process_group("gloo")
    model = blocks.Stack(dropout=0.0)
    if torch.distributed.get_rank() == 1:
        model.blocks[1] = Unsteady(how)
    blocks.wrap(model, form)
    model = {"ddp": DistributedDataParallel, "fsdp": FullyShardedDataParallel}[wrap](model)
    model(torch.randn(4, 8)).pow(2).mean().backward()


@pytest.mark.parametrize(
    ("how", "form", "wrap", "text"),
    [
        ("in place", "own graph", "ddp", "Unsteady blocks.1: input 0 has been modified"),
        ("other shapes", "module", "ddp", "Unsteady blocks.1: output 0 of the recomputation"),
        ("other shapes", "own graph", "fsdp", "Unsteady blocks.1: Recomputed values"),
    ],
)
def test_the_block_is_named_on_every_rank(how, form, wrap, text):
    other, own = ranks.launch(unsteady_on_rank, 2, how, form, wrap, deadline=90.0)
    assert f"libddp checkpoint of {text}" in own.message
    assert own.error == ("RuntimeError" if form == "module" else "CheckpointError")
    assert other.error == "PeerError"
    assert "rank 1" in other.message
    assert f"in backward: {own.error}: libddp checkpoint of {text}" in other.message
