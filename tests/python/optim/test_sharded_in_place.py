"""AdamW(shard_over=model) and scripts that change parameters in place, as every rank does in torch:
against torch's DDP and fused AdamW, bit for bit on two ranks."""

import checks
import torch
import torch.distributed as dist
from ddp_models import Mlp
from states import assert_same
from torch import nn
from usage import assert_agree, compare, data, ours, parameters


class Run:
    """A model of several pages, its optimizer, and something to note things in."""

    def __init__(self, wrap):
        self.model = wrap(nn.Sequential(Mlp(2), nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 16)))
        if wrap is ours:
            from libddp.optim import AdamW

            self.optimizer = AdamW(self.model.parameters(), lr=0.05, shard_over=self.model)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)
        self.parameters = list(self.model.parameters())
        self.averages = parameters(self.model)
        self.seen = []

    def backward(self):
        self.optimizer.zero_grad()
        self.model(data(4)).pow(2).mean().backward()

    def evaluate(self):
        with torch.no_grad():
            self.seen.append(self.model(torch.ones(2, 16)))


def noise(step, parameter):
    """The same on every rank."""
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))


@torch.no_grad()
def decoupled_decay(run, step):
    for p in run.parameters:
        p.mul_(0.9)


def decay_of_data(run, step):
    for p in run.parameters:
        p.data.mul_(0.9)


@torch.no_grad()
def clipped_weights(run, step):
    for p in run.parameters:
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def noisy_weights(run, step):
    for p in run.parameters:
        p.add_(noise(step, p), alpha=0.01)


@torch.no_grad()
def averages_swapped_in_and_out(run, step):
    kept = parameters(run.model)
    for p, average in zip(run.parameters, run.averages, strict=True):
        average.lerp_(p, 0.1)
        p.data.copy_(average)
    run.evaluate()
    for p, value in zip(run.parameters, kept, strict=True):
        p.data.copy_(value)
    run.evaluate()


def perturbed_and_restored(run, step):
    """A second pass at other weights, as SAM has it."""
    kept = parameters(run.model)
    noisy_weights(run, step)
    run.backward()
    with torch.no_grad():
        for p, value in zip(run.parameters, kept, strict=True):
            p.copy_(value)


def a_state_dict_loaded(run, step):
    state = {name: value * 0.5 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state)


@torch.no_grad()
def one_of_many(run, step):
    run.parameters[-1][3] += 1
    run.parameters[2].data[0, 0] = 5


CHANGES = (
    decoupled_decay,
    decay_of_data,
    clipped_weights,
    noisy_weights,
    averages_swapped_in_and_out,
    perturbed_and_restored,
    a_state_dict_loaded,
    one_of_many,
)


def norms_of(tensors):
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors])


@torch.no_grad()
def sharpness_aware(run, step):
    """SAM: the gradient that counts is that at the worst weights nearby."""
    kept = parameters(run.model)
    length = torch.linalg.vector_norm(norms_of(p.grad for p in run.parameters))
    for p in run.parameters:
        p.add_(p.grad, alpha=0.05 / length.item())
    with torch.enable_grad():
        run.backward()
    for p, value in zip(run.parameters, kept, strict=True):
        p.copy_(value)


@torch.no_grad()
def adaptive_clipping(run, step):
    """AGC: each row's gradient by the norm of the row."""
    for p in run.parameters:
        rows = (p, p.grad) if p.dim() > 1 else (p[:, None], p.grad[:, None])
        size, slope = (t.norm(dim=1, keepdim=True) for t in rows)
        factor = (0.01 * size.clamp(min=1e-3) / slope.clamp(min=1e-6)).clamp(max=1)
        p.grad.mul_(factor if p.dim() > 1 else factor[:, 0])


@torch.no_grad()
def clipped_by_hand(run, step):
    length = torch.linalg.vector_norm(norms_of(p.grad for p in run.parameters))
    run.seen.append(length)
    for p in run.parameters:
        p.grad.mul_(0.1 / length)


@torch.no_grad()
def signs_of_gradients(run, step):
    """Gradients in another layout, made of the old ones."""
    for p in run.parameters:
        p.grad = p.grad.sign() * p.grad.abs().mean()


FROM_GRADIENTS = (sharpness_aware, adaptive_clipping, clipped_by_hand, signs_of_gradients)


def before_the_step(run, change, step):
    run.backward()
    change(run, step)
    run.optimizer.step()


def after_the_step(run, change, step):
    run.backward()
    run.optimizer.step()
    change(run, step)


def before_the_forward(run, change, step):
    change(run, step)
    run.evaluate()
    run.backward()
    run.optimizer.step()
    run.evaluate()


def trained(wrap, change, moment):
    run = Run(wrap)
    for step in range(4):
        moment(run, change, step)
        run.seen.append(parameters(run.model))
    assert_agree(run.parameters)
    return run.seen


def check_before_the_step():
    for change in CHANGES:
        compare(trained, change, before_the_step)


def check_what_is_computed_from_gradients():
    for change in FROM_GRADIENTS:
        compare(trained, change, before_the_step)
        compare(trained, change, after_the_step)


def check_after_the_step():
    for change in CHANGES:
        compare(trained, change, after_the_step)


def check_before_the_forward():
    for change in CHANGES:
        compare(trained, change, before_the_forward)


def check_one_rank_looks_at_other_weights_while_the_others_train():
    def train(wrap, swaps):
        run = Run(wrap)
        for _ in range(3):
            run.backward()
            if swaps and dist.get_rank() == 0:
                kept = parameters(run.model)
                with torch.no_grad():
                    for p in run.parameters:
                        p.zero_()
                    assert run.model.module(torch.ones(2, 16)).abs().sum() == 0
                    for p, value in zip(run.parameters, kept, strict=True):
                        p.copy_(value)
            run.optimizer.step()
        return parameters(run.model)

    plain, swapped = compare(train, False), compare(train, True)
    assert_same(plain, swapped)


def check_the_owners_values_count():
    """As with torch's ZeroRedundancyOptimizer: where ranks differ, until the next step."""
    run = Run(ours)
    for _ in range(2):
        run.backward()
        run.optimizer.step()
    with torch.no_grad():
        for p in run.parameters:
            p.add_(dist.get_rank())
    run.backward()
    run.optimizer.step()
    assert_agree(run.parameters)


results, test_on_all_ranks = checks.suite(globals(), 2)
