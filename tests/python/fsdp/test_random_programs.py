"""What scripts do to parameters and gradients, in any order: after each, what torch's FSDP2 has."""

import random

import checks
import fsdp_models as models
import torch
from torch.distributed.tensor import DTensor

NUM_OPERATIONS = 40


class Script:
    """A model and its optimizer. Each operation draws the same from `random` for both models."""

    def __init__(self, model, make_optimizer):
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = make_optimizer(self.parameters)
        self.kept = []
        self.state = None

    def some(self, draw, of):
        return [p for p in self.parameters if of(p) and draw.random() < 0.3]

    def gradients(self, draw):
        return self.some(draw, lambda p: p.grad is not None)

    def backward(self, draw):
        self.model(models.tokens(draw.randrange(9)))[1].backward()

    def two_forwards(self, draw):
        losses = [self.model(models.tokens(draw.randrange(9)))[1] for _ in range(2)]
        sum(losses).backward()

    def forward_alone(self, draw):
        with torch.no_grad():
            self.model(models.tokens(draw.randrange(9)))

    def backward_without_sync(self, draw):
        self.model.set_requires_gradient_sync(False)
        self.backward(draw)
        self.model.set_requires_gradient_sync(True)
        self.backward(draw)

    def step(self, draw):
        self.optimizer.step()

    def zero_grad(self, draw):
        self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)

    def clear_some(self, draw):
        for parameter in self.gradients(draw):
            parameter.grad = None

    def scale(self, draw):
        for parameter in self.gradients(draw):
            parameter.grad = parameter.grad * 0.5

    def scale_in_place(self, draw):
        for parameter in self.gradients(draw):
            parameter.grad *= 2.0

    def clone(self, draw):
        for parameter in self.gradients(draw):
            parameter.grad = parameter.grad.clone()

    def keep(self, draw):
        self.kept += [p.grad for p in self.gradients(draw)]

    def forget(self, draw):
        self.kept = []

    def clip(self, draw):
        if any(p.grad is not None for p in self.parameters):
            torch.nn.utils.clip_grad_norm_(self.parameters, 0.3)

    def freeze(self, draw):
        for parameter in self.some(draw, lambda p: p.dim() == 1):
            parameter.requires_grad_(not parameter.requires_grad)

    def write(self, draw):
        with torch.no_grad():
            for parameter in self.some(draw, lambda p: True):
                parameter.mul_(0.99)

    def remember(self, draw):
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, draw):
        if self.state is not None:
            self.model.load_state_dict(self.state)


OPERATIONS = [name for name in vars(Script) if not name.startswith("_")]
OPERATIONS = [name for name in OPERATIONS if name not in ("some", "gradients")]
OPERATIONS += 4 * ["backward"] + 2 * ["step", "zero_grad"]


def assert_alike(mine, other, where):
    assert (mine is None) == (other is None), where
    if mine is not None:
        assert isinstance(mine, DTensor), where
        torch.testing.assert_close(
            mine.to_local(), other.to_local(), msg=lambda text: f"{where}: {text}"
        )


def assert_scripts_alike(ours, theirs, done):
    names = [name for name, _ in ours.model.named_parameters()]
    for name, mine, other in zip(names, ours.parameters, theirs.parameters, strict=True):
        where = f"{name} after {', '.join(done)}"
        assert_alike(mine.detach(), other.detach(), where)
        assert_alike(mine.grad, other.grad, f"gradient of {where}")
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        assert_alike(mine, other, f"a gradient that was kept, after {', '.join(done)}")


def run(seed, make_optimizer):
    ours = Script(models.shard(), make_optimizer)
    # Else torch's root keeps whole values over a forward alone and a step, and computes with them.
    theirs = Script(models.theirs(reshard_after_forward=True), make_optimizer)
    draw, done = random.Random(seed), []
    for _ in range(NUM_OPERATIONS):
        operation, argument = draw.choice(OPERATIONS), draw.random()
        done.append(operation)
        for script in (theirs, ours):
            getattr(script, operation)(random.Random(argument))
        assert_scripts_alike(ours, theirs, done)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def check_with_sgd():
    for seed in range(3):
        run(seed, sgd)


def check_with_adamw():
    for seed in range(100, 103):
        run(seed, models.adamw)


results, test_on_two_ranks = checks.suite(globals(), 2)
