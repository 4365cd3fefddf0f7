"""A Trainer whose network is sharded over the ranks (FSDP): each owns a part of every weight.

All ranks evaluate and save together, since none has all weights: rank 0 says when, and the others
follow. Checkpoints hold whole tensors as train.py's do, so that either script goes on from them.
"""

import contextlib

import torch
from config import UserError
from data import Corpus
from libddp.distributed import broadcast
from libddp.distributed.fsdp import FullyShardedDataParallel as FSDP
from libddp.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from libddp.distributed.fsdp.wrap import ModuleWrapPolicy
from model import GPT, Block
from settings import TrainSettings
from trainer import Ranks, Trainer


class ShardedTrainer(Trainer):
    """Thread rule: one thread."""

    def __init__(self, settings: TrainSettings, corpus: Corpus, ranks: Ranks):
        if ranks.device.type != "cpu" or settings.compile:
            raise UserError("train_fsdp.py shards on the CPU so far: --device=cpu --compile=False")
        super().__init__(settings, corpus, ranks)
        self._weights: dict = {}

    def wrap(self) -> None:
        """From now on each rank has its part of weights and moments, and blocks gather theirs."""
        state = self.optimizer.state_dict()
        # Ranks seed themselves apart, so that they begin with rank 0's weights, as under DDP.
        policy = ModuleWrapPolicy({Block})
        self._model = FSDP(self.core, auto_wrap_policy=policy, sync_module_states=True)
        self.saves_together = True
        if self.scaler.is_enabled():
            # All ranks skip a step if one of them has had an overflow.
            state_of_scaler = self.scaler.state_dict()
            self.scaler = ShardedGradScaler(self.ranks.device.type)
            self.scaler.load_state_dict(state_of_scaler)
        if state["state"]:
            named = _renamed(state, self._names())
            FSDP.optim_state_dict_to_load(self._model, self.optimizer, named, load_directly=True)

    def weights(self) -> dict:
        """On all ranks; a collective."""
        self._weights = self._model.state_dict()
        return self._weights

    def moments(self) -> dict:
        """By number, as torch.optim has them; a collective."""
        if not self.saves_together:
            return super().moments()
        state = FSDP.optim_state_dict(self._model, self.optimizer)
        return _renamed(state, {name: index for index, name in self._names().items()})

    def whole_core(self) -> GPT:
        """Made from the last checkpoint."""
        if not self.saves_together:
            return self.core
        core = GPT(self.core.config)
        core.load_state_dict(self._weights)
        return core

    def agree(self, wish: bool) -> bool:
        """Rank 0's wish, on every rank; a collective."""
        if not self.saves_together:
            return wish
        told = torch.tensor([int(wish)])
        broadcast(told, src=0)
        return bool(told)

    def follower(self, last: int) -> "Follower":
        """What the other ranks do while rank 0 evaluates and saves: the same."""
        return Follower(self, last)

    def _reducing(self, reduces: bool):
        if not self.saves_together or reduces:
            return contextlib.nullcontext()
        return self._model.no_sync()

    @property
    def _evaluated(self):
        return self._model

    def _names(self) -> dict[int, str]:
        """Number of a parameter in the optimizer -> its name."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {index: names[id(p)] for index, p in enumerate(parameters)}


class Follower:
    """In place of a Report: takes part where rank 0 needs all ranks, and says nothing."""

    def __init__(self, trainer: ShardedTrainer, last: int):
        self._trainer, self._last = trainer, last

    def before(self, iteration: int) -> None:
        """Evaluate and save when rank 0 does."""
        if iteration == self._last or iteration % self._trainer.settings.eval_interval == 0:
            self._trainer.evaluate()
        if self._trainer.agree(False):
            self.save()

    def after(self, iteration: int, loss) -> None:
        """Nothing to log."""

    def save(self) -> None:
        """Give rank 0 this rank's part of the checkpoint, in the order of resume.store."""
        self._trainer.weights()
        self._trainer.moments()


def _renamed(state: dict, names: dict) -> dict:
    """An optimizer's state with other keys."""
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": groups,
    }
