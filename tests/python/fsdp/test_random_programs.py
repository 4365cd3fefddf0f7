"""What scripts do to parameters and gradients, in any order: after each, what torch's FSDP2 has."""

import checks
import fsdp_models as models
import random_scripts
import torch
from torch.distributed.tensor import DTensor


class Script(random_scripts.Script):
    def __init__(self, model, make_optimizer):
        super().__init__(model, make_optimizer(model.parameters()))

    def _loss(self, draw):
        return self.model(models.tokens(draw.randrange(9)))[1]

    def two_forwards(self, draw):
        (self._loss(draw) + self._loss(draw)).backward()

    def backward_twice(self, draw):
        loss = self._loss(draw)
        loss.backward(retain_graph=True)
        loss.backward()

    def drop_a_graph(self, draw):
        self._loss(draw)

    def backward_without_sync(self, draw):
        self.model.set_requires_gradient_sync(False)
        self.backward(draw)
        self.model.set_requires_gradient_sync(True)
        self.backward(draw)

    def freeze(self, draw):
        for parameter in self._some(draw):
            if parameter.dim() == 1:
                parameter.requires_grad_(not parameter.requires_grad)


def assert_alike(mine, other, where):
    assert (mine is None) == (other is None), where
    if mine is not None:
        assert isinstance(mine, DTensor), where
        torch.testing.assert_close(
            mine.to_local(), other.to_local(), msg=lambda text: f"{where}: {text}"
        )


def assert_scripts_alike(ours, theirs, after):
    names = [name for name, _ in ours.model.named_parameters()]
    for name, mine, other in zip(names, ours.parameters, theirs.parameters, strict=True):
        assert_alike(mine.detach(), other.detach(), f"{name} {after}")
        assert_alike(mine.grad, other.grad, f"gradient of {name} {after}")
    for mine, other in zip(ours.kept, theirs.kept, strict=True):
        assert_alike(mine, other, f"a gradient that was kept, {after}")


def run(seed, make_optimizer):
    ours = Script(models.shard(), make_optimizer)
    # Else torch's root keeps whole values over a forward alone and a step, and computes with them.
    theirs = Script(models.theirs(reshard_after_forward=True), make_optimizer)
    random_scripts.run(seed, ours, theirs, assert_scripts_alike)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def check_with_sgd():
    for seed in range(3):
        run(seed, sgd)


def check_with_adamw():
    for seed in range(100, 103):
        run(seed, models.adamw)


results, test_on_all_ranks = checks.suite(globals(), 2, apart=True)
