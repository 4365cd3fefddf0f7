"""What scripts do to sharded models, in any order: after each, the values that torch's DDP has.

For FSDP1 and for parameters that are plain tensors, which torch's own FSDP1 shows in other shapes.
"""

import contextlib
import random

import checks
import ddp_models
import fsdp_models as models
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

NUM_OPERATIONS = 40


class Script:
    """A model and its optimizer. Each operation draws the same for both models."""

    def __init__(self, model, no_sync):
        self.model, self._no_sync = model, no_sync
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)
        self.state = None

    def _some(self, draw):
        return [p for p in self.parameters if draw.random() < 0.3]

    def _with_gradients(self, draw):
        # Of a small parameter a rank may have no row, and then has no gradient either.
        return [p for p in self._some(draw) if p.grad is not None]

    def _loss(self, draw):
        return self.model(models.tokens(draw.randrange(9)))[1]

    def backward(self, draw):
        self._loss(draw).backward()

    def two_forwards(self, draw):
        (self._loss(draw) + self._loss(draw)).backward()

    def accumulate(self, draw):
        with self._no_sync(self.model):
            for _ in range(draw.randrange(1, 3)):
                self.backward(draw)
        self.backward(draw)

    def accumulate_and_clear(self, draw):
        with self._no_sync(self.model):
            self.backward(draw)
        self.optimizer.zero_grad()
        self.backward(draw)

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

    def set_data(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)

    def clone(self, draw):
        for parameter in self._with_gradients(draw):
            parameter.grad = parameter.grad.clone()

    def give(self, draw):
        for parameter in self._some(draw):
            parameter.grad = torch.full_like(parameter, 0.25)

    def write(self, draw):
        with torch.no_grad():
            for parameter in self._some(draw):
                parameter.mul_(0.99)

    def write_data(self, draw):
        for parameter in self._some(draw):
            parameter.data.mul_(1.01)

    def swap_data(self, draw):
        for parameter in self._some(draw):
            parameter.data = parameter.data * 1.01

    def freeze(self, draw):
        for parameter in self._some(draw):
            parameter.requires_grad_(not parameter.requires_grad)

    def remember(self, draw):
        self.state = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, draw):
        if self.state is not None:
            self.model.load_state_dict(self.state)

    def load_optimizer(self, draw):
        self.optimizer.load_state_dict(self.optimizer.state_dict())


OPERATIONS = [name for name in vars(Script) if not name.startswith("_")]
OPERATIONS += 6 * ["backward"] + 3 * ["step", "zero_grad"]


def run(seed, make_model, no_sync, without=()):
    ours = Script(make_model(), no_sync)
    theirs = TorchDDP(models.build(), process_group=ddp_models.gloo(), find_unused_parameters=True)
    theirs = Script(theirs, TorchDDP.no_sync)
    operations = [name for name in OPERATIONS if name not in without]
    draw, done = random.Random(seed), []
    for _ in range(NUM_OPERATIONS):
        operation, argument = draw.choice(operations), draw.random()
        done.append(operation)
        for script in (theirs, ours):
            getattr(script, operation)(random.Random(argument))
        assert_models_alike(ours.model, theirs.model.module, done)


def assert_models_alike(ours, theirs, done):
    state = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
    for name, value in theirs.state_dict().items():
        where = f"{name} after {', '.join(done)}"
        torch.testing.assert_close(
            # Sums of ranks and of passes are added in another order.
            state[name],
            value,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, where=where: f"{where}: {text}",
        )


SEEDS = range(3)


def run_plain(**arguments):
    @contextlib.contextmanager
    def no_sync(model):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    for seed in SEEDS:
        # zero_grad() clears no sums of such passes, as in torch's FSDP2.
        run(seed, lambda: models.shard_plain(**arguments), no_sync, ["accumulate_and_clear"])


def run_fsdp1(strategy):
    strategy = models.libddp_fsdp().ShardingStrategy[strategy]
    for seed in SEEDS:
        run(seed, lambda: models.wrap(sharding_strategy=strategy), lambda model: model.no_sync())


def check_plain():
    run_plain()


def check_plain_that_stays_whole():
    run_plain(reshard_after_forward=False)


def check_full_shard():
    run_fsdp1("FULL_SHARD")


def check_shard_grad_op():
    run_fsdp1("SHARD_GRAD_OP")


def check_no_shard():
    run_fsdp1("NO_SHARD")


results, test_on_two_ranks = checks.suite(globals(), 2)
