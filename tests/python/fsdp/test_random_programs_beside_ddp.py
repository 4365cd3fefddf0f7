"""What scripts do to sharded models, in any order: after each, the values that torch's DDP has.

For FSDP1 and for parameters that are plain tensors, which torch's own FSDP1 shows in other shapes.
"""

import contextlib

import checks
import ddp_models
import fsdp_models as models
import pytest
import random_scripts
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

#: Of gradients each rank has its rows; their norm is no rank's own.
OF_WHOLE_GRADIENTS = ["keep", "forget", "clip"]


class Failed(Exception):
    pass


def fail(*_):
    raise Failed


class Script(random_scripts.Script):
    def __init__(self, model, no_sync):
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        self._no_sync = no_sync

    def _loss(self, draw):
        return self.model(models.tokens(draw.randrange(9)))[1]

    def two_forwards(self, draw):
        (self._loss(draw) + self._loss(draw)).backward()

    def drop_a_graph(self, draw):
        self._loss(draw)

    def fail_in_a_block(self, draw):
        blocks = [m for m in self.model.modules() if isinstance(m, models.Block)]
        hook = blocks[draw.randrange(len(blocks))].register_forward_hook(fail)
        with pytest.raises(Failed):
            self._loss(draw)
        hook.remove()

    def fail_behind_the_model(self, draw):
        loss = self._loss(draw) * torch.ones((), requires_grad=True)
        loss.register_hook(fail)
        with pytest.raises(Failed):
            loss.backward()

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

    def give(self, draw):
        for parameter in self._some(draw):
            parameter.grad = torch.full_like(parameter, 0.25)

    def write_data(self, draw):
        for parameter in self._some(draw):
            parameter.data.mul_(1.01)

    def swap_data(self, draw):
        for parameter in self._some(draw):
            parameter.data = parameter.data * 1.01

    def freeze(self, draw):
        for parameter in self._some(draw):
            parameter.requires_grad_(not parameter.requires_grad)

    def load_optimizer(self, draw):
        self.optimizer.load_state_dict(self.optimizer.state_dict())


def run(seed, make_model, no_sync, without=()):
    ours = Script(make_model(), no_sync)
    theirs = TorchDDP(models.build(), process_group=ddp_models.gloo(), find_unused_parameters=True)
    theirs = Script(theirs, TorchDDP.no_sync)
    random_scripts.run(seed, ours, theirs, assert_models_alike, [*without, *OF_WHOLE_GRADIENTS])


def assert_models_alike(ours, theirs, after):
    state = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True))
    for name, value in theirs.model.module.state_dict().items():
        torch.testing.assert_close(
            # Sums of ranks and of passes are added in another order.
            state[name],
            value,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda text, where=f"{name} {after}": f"{where}: {text}",
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


results, test_on_all_ranks = checks.suite(globals(), 2, apart=True)
