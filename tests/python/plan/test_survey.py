"""What a pass takes, seen on tensors without data."""

import pytest
import torch
from libddp.errors import ArgumentError
from libddp.plan import Batch, Precision, survey, torch_optimizer
from libddp.plan.gpt import Gpt
from libddp.plan.model_survey import find_blocks, unit_modules
from torch import nn

WIDTH = 64


class Net(nn.Module):
    """Linear layers with what they keep known: the input of each."""

    def __init__(self, depth=3, bias=False):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x):
        return self.layers(x)


class Tied(nn.Module):
    """Two uses of one weight, one of them in a block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.blocks[0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def inputs(*shape, dtype=torch.float32):
    return Batch(32, inputs=((dtype, shape),))


def test_activations_are_what_autograd_keeps():
    facts = survey(Net, inputs(WIDTH))
    tensor = 32 * WIDTH * 4
    # The batch, which is kept for the gradient of the first weight, and one per layer behind it;
    # the output is kept by the script, and its mean is a scalar.
    assert facts.plain.kept == 4 * tensor + 4
    weight = WIDTH * WIDTH * 4
    assert facts.parameter_bytes == 3 * weight
    assert facts.plain.kept + weight <= facts.plain.peak <= facts.plain.kept + weight + 3 * tensor
    assert facts.buffers == 28


def test_gradients_come_from_the_last_layer():
    events = survey(Net, inputs(WIDTH)).plain.events
    assert [e.which for e in events if e.what == "gradient"] == [2, 1, 0]
    assert [(e.what, e.which) for e in events[:3]] == [
        ("forward", 0),
        ("forward", 1),
        ("forward_end", 1),
    ]


def test_recomputation_keeps_less():
    facts = survey(lambda: Gpt(4, WIDTH, 4, length=32, vocabulary=50), Batch(4, 32))
    assert facts.units == ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert facts.recomputed.kept < facts.plain.kept / 2
    assert facts.recomputed.peak < facts.plain.peak
    gradients = [e.which for e in facts.recomputed.events if e.what == "gradient"]
    assert sorted(gradients) == list(range(len(facts.parameters)))


def test_tied_weights_belong_to_the_root_if_several_units_use_them():
    facts = survey(Tied, inputs(8))
    assert [(p.name, p.unit) for p in facts.parameters] == [
        ("blocks.0.weight", 0),
        ("blocks.1.weight", 2),
    ]


def test_blocks_are_what_repeats_with_most_parameters():
    model = nn.Sequential(nn.ModuleList([nn.LayerNorm(4) for _ in range(9)]), Net())
    assert find_blocks(model) == ("Linear",)
    assert find_blocks(nn.Linear(2, 2)) == ()
    assert list(unit_modules(Net(2), ("Linear",))) == ["", "layers.0", "layers.1"]


def test_without_blocks_nothing_is_recomputed():
    facts = survey(lambda: nn.Linear(8, 8), inputs(8))
    assert facts.recomputed is None
    assert facts.units == ("",)


def test_precision_halves_parameters_or_what_is_computed():
    plain = survey(Net, inputs(WIDTH))
    low = survey(Net, inputs(WIDTH, dtype=torch.bfloat16), precision=Precision(torch.bfloat16))
    assert low.parameter_bytes * 2 == plain.parameter_bytes
    mixed = survey(Net, inputs(WIDTH), precision=Precision(compute=torch.bfloat16))
    assert mixed.parameter_bytes == plain.parameter_bytes
    assert mixed.plain.kept < 0.6 * plain.plain.kept


def test_a_loss_is_found_in_what_a_model_returns():
    class Pair(Net):
        def forward(self, x):
            y = self.layers(x)
            return {"logits": y, "loss": y.pow(2).mean()}

    assert survey(Pair, inputs(WIDTH)).plain.peak > 0


class NoGradient(Net):
    def forward(self, x):
        return self.layers(x).detach()


class Reads(Net):
    def forward(self, x):
        return self.layers(x) * x.sum().item()


def frozen():
    return Net().requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "batch", "blocks", "words"),
    [
        (Net, Batch(0, 8), None, "a batch of 0 x 8 is nothing to compute"),
        (Net, Batch(8, -1), None, "a batch of 8 x -1"),
        (Net, inputs(WIDTH), ("Block",), r"--block Block: .* Hint: it has Linear, Net, Sequential"),
        (Net, inputs(WIDTH + 1), None, "the model does not run: .*Hint: .*--inputs"),
        (Reads, inputs(WIDTH), None, "the model does not run: .*cannot read values"),
        (NoGradient, inputs(WIDTH), None, "returned no tensor that depends on its parameters"),
        (frozen, inputs(WIDTH), None, "no parameter that is trained"),
    ],
)
def test_what_cannot_be_surveyed(make, batch, blocks, words):
    with pytest.raises(ArgumentError, match=words):
        survey(make, batch, blocks)


MATRIX, FLOATS = (256, 256), 256 * 256


@pytest.mark.parametrize(
    ("name", "arguments", "numbers_kept"),
    [
        ("adamw", {}, 2),
        ("libddp.AdamW", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 1),
        ("adagrad", {}, 1),
    ],
)
def test_optimizers_keep(name, arguments, numbers_kept):
    cost = torch_optimizer(name, arguments)([(MATRIX, 4)] * 3)
    state = 3 * FLOATS * 4 * numbers_kept
    assert state <= cost.state <= state + 64


def test_a_loop_over_parameters_takes_less_for_a_moment_than_one_over_all():
    sizes = [(MATRIX, 4)] * 8
    fused, loop, foreach = (
        torch_optimizer("adamw", {key: True} if key else {})(sizes).transient
        for key in ("fused", "", "foreach")
    )
    assert fused < FLOATS < loop < foreach


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("adamx", {}, "--optimizer 'adamx' is unknown. Hint: one of .*adamw.*libddp.adamw"),
        ("optimizer", {}, "is unknown"),
        ("adamw", {"speed": 3}, "--optimizer adamw: TypeError: .*speed.*--optimizer-args"),
        ("lbfgs", {}, "--optimizer lbfgs: .*needs a closure"),
    ],
)
def test_optimizers_that_cannot_be(name, arguments, words):
    with pytest.raises(ArgumentError, match=words):
        torch_optimizer(name, arguments)([(MATRIX, 4)])
