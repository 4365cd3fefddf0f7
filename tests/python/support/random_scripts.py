"""Random programs of what training scripts do, run with two models that should stay alike.

class OfTokens(random_scripts.Script):
    def _loss(self, draw):
        return self.model(tokens(draw.randrange(9)))

random_scripts.run(seed, OfTokens(ours, adamw(ours)), OfTokens(theirs, adamw(theirs)), compare)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

NUM_OPERATIONS = 40


class Script:
    """A model and its optimizer. Each public method is an operation.

    An operation draws the same for both models, so it may not look at a model before it draws.
    """

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.parameters = list(model.parameters())
        self.kept = []
        self.state = None

    def _loss(self, draw) -> torch.Tensor:
        raise NotImplementedError

    def _some(self, draw):
        return [p for p in self.parameters if draw.random() < 0.3]

    def _with_gradients(self, draw):
        return [p for p in self._some(draw) if p.grad is not None]

    def backward(self, draw):
        self._loss(draw).backward()

    def forward_alone(self, draw):
        with torch.no_grad():
            self._loss(draw)

    def evaluate(self, draw):
        self.model.eval()
        with torch.no_grad():
            self._loss(draw)
        self.model.train()

    def step(self, draw):
        self.optimizer.step()

    def zero_grad(self, draw):
        self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)

    def clear_some(self, draw):
        for parameter in self._some(draw):
            parameter.grad = None

    def scale_anew(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad = parameter.grad * 0.5

    def scale_in_place(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad *= 2.0

    def clone(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad = parameter.grad.clone()

    def set_data(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad.data = parameter.grad.data.clamp(-0.1, 0.1)

    def keep(self, draw):
        self.kept += [p.grad for p in self._with_gradients(draw)]

    def forget(self, draw):
        self.kept = []

    def clip(self, draw):
        if any(p.grad is not None for p in self.parameters):
            torch.nn.utils.clip_grad_norm_(self.parameters, 0.3)

    def write(self, draw):
        with torch.no_grad():
            for parameter in self._some(draw):
                parameter.mul_(0.99)

    def remember(self, draw):
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, draw):
        if self.state is not None:
            self.model.load_state_dict(self.state)


def run(
    seed: int,
    ours: Script,
    theirs: Script,
    compare: Callable[[Script, Script, str], None],
    without: Sequence[str] = (),
) -> None:
    """
    Args:
        compare: after each operation, with what has been done, as words.
        without: these operations are left out.
    """
    names = [name for name in dir(type(ours)) if not name.startswith("_")]
    names += 5 * ["backward"] + 2 * ["step", "zero_grad"]
    names = [name for name in names if name not in without]
    draw, done = random.Random(seed), []
    for _ in range(NUM_OPERATIONS):
        name, argument = draw.choice(names), draw.random()
        done.append(name)
        for script in (theirs, ours):
            getattr(script, name)(random.Random(argument))
        compare(ours, theirs, f"after {', '.join(done)}")
