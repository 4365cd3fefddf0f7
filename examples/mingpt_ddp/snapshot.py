"""Snapshots at the ends of epochs: what is in such a file, and whether one fits.

    data = snapshot.pack(trainer)                    # bytes
    snapshot.unpack(data, trainer, "run/snapshot.pt")

Only tensors and plain values are inside, and only such are read (weights_only=True): a snapshot
from elsewhere cannot run code. No random state is inside: it follows from seed, epoch and rank, so
a run may resume on another number of ranks.
"""

import contextlib
import io
import pickle
from dataclasses import asdict

import torch
from errors import UserError, reason

FORMAT = 1


def pack(trainer) -> bytes:
    """The state after `trainer.finished_epochs` whole epochs, as torch.save writes it."""
    state = {
        "format": FORMAT,
        "finished_epochs": trainer.finished_epochs,
        "gpt_config": asdict(trainer.core.config),
        "chars": trainer.chars,
        "model": trainer.core.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.scaler.state_dict(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(data: bytes, trainer, path: str) -> None:
    """Put the state into `trainer`. Raises: UserError if it is damaged or of another model."""
    hint = f"Hint: another trainer_config.snapshot_path, or move {path} away to start anew"
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("it is not a snapshot of this program")
    except (OSError, EOFError, ValueError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"cannot read the snapshot {path}: {reason(error)}. {hint}") from error
    different = differences(state, trainer)
    if different:
        raise UserError(f"the snapshot {path} is of another model: {different}. {hint}")
    trainer.core.load_state_dict(state["model"])
    with options_of_now(trainer.optimizer):
        trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.scaler.is_enabled() and state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.finished_epochs = state["finished_epochs"]


@contextlib.contextmanager
def options_of_now(optimizer: torch.optim.Optimizer):
    """In here moments are loaded; learning rate and the like stay as configured now."""
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    yield
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)


def differences(state: dict, trainer) -> str:
    """Names what does not fit; dropout may change from run to run."""
    there, here = state["gpt_config"], asdict(trainer.core.config)
    found = [
        f"{name} is {there.get(name)} there and {here[name]} here"
        for name in here
        if not name.endswith("_pdrop") and there.get(name) != here[name]
    ]
    if not found and state["chars"] != trainer.chars:
        odd = sorted(set(state["chars"]) ^ set(trainer.chars))[:5]
        found = [f"it was trained on a text with other characters (such as {odd})"]
    return ", ".join(found)
