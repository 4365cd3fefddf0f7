"""What accelerate's register_for_checkpointing takes: a Snapshot's saves under save_state.

from libddp.snapshot.accelerate import SnapshotState

state = SnapshotState(libddp.Snapshot("out/run"), model, optimizer)   # after prepare()
state.attach(accelerator)
for step in range(state.resume() + 1, 1001):      # of the newest save; 0 where there is none
    train()
    state.step = step
    state.save()                                  # memory
    if step % 100 == 0:
        accelerator.save_state(f"out/{step}")     # stored; load_state loads it
"""

from __future__ import annotations

from typing import Any

from libddp.errors import ArgumentError
from libddp.snapshot._snapshot import SaveReport, Snapshot


class SnapshotState:
    """Model and optimizer that accelerator.save_state has in a Snapshot.

    Args:
        snapshot: with a folder.
        model, optimizer, stateful: as Snapshot.save takes them, after accelerator.prepare.

    Attributes:
        step: of the next save.
    """

    def __init__(self, snapshot: Snapshot, model=None, optimizer=None, **stateful: Any) -> None:
        self.step = 0
        self._snapshot = snapshot
        self._model = model
        self._optimizer = optimizer
        self._stateful = stateful

    def attach(self, accelerator) -> None:
        """Registers it, and takes over the model's weights, which accelerate writes no more."""
        accelerator.register_for_checkpointing(self)
        if self._model is not None:
            accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
            accelerator.register_load_state_pre_hook(lambda models, _: models.clear())

    def save(self, storage: bool = False) -> SaveReport:
        """Saves the step; a collective."""
        return self._snapshot.save(
            self.step,
            self._model,
            self._optimizer,
            extra={"step": self.step},
            storage=storage,
            **self._stateful,
        )

    def resume(self, step: int | None = None) -> int:
        """Loads the newest save, or that of a step; returns its step, 0 where there is none."""
        extra = self._snapshot.load(self._model, self._optimizer, step=step, **self._stateful)
        self.step = extra.get("step", 0)
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Called by accelerator.save_state on all ranks: the step is in the folder after it."""
        self.save(storage=True)
        self._snapshot.wait()
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by accelerator.load_state on all ranks."""
        step = int(state_dict["step"])
        if self.resume(step) != step:
            raise ArgumentError(
                f"libddp snapshot: there is no save of step {step} (any more). Hint: a Snapshot of "
                "the same folder with a larger keep; resume() loads the newest."
            )
