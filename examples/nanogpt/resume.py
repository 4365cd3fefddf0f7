"""Between a trainer and its checkpoint in out_dir.

    with claim(out_dir): ...   # rank 0, for the whole run
restore(trainer)      # every rank, before the first iteration
store(trainer)        # rank 0
"""

import fcntl
from dataclasses import asdict
from pathlib import Path
from typing import IO

import checkpoint
from config import UserError
from settings import MODEL_KEYS
from trainer import Trainer


def claim(folder: Path) -> IO:
    """Keep a second run out of `folder` until the result is closed or we die. Raises: UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        hint = "wait for it, end it, or use another --out_dir"
        raise UserError(f"another run is training in {folder}; {hint}") from error
    return lock


def store(trainer: Trainer) -> None:
    """Save the run's state. Raises: UserError (the disk is full, ...)."""
    state = {
        "iter": trainer.iteration,
        "model": trainer.weights(),
        "optimizer": trainer.moments(),
        "scaler": trainer.scaler.state_dict(),
        "best_val_loss": trainer.best_val_loss,
        "model_config": asdict(trainer.core.config),
        "chars": trainer.corpus.chars,
    }
    checkpoint.save(Path(trainer.settings.out_dir), state)


def restore(trainer: Trainer) -> None:
    """Take up the checkpoint, as init_from says. Raises: UserError."""
    folder = Path(trainer.settings.out_dir)
    if trainer.settings.init_from == "scratch":
        return
    state = checkpoint.load(folder, trainer.ranks.device)
    if state is None:
        if trainer.settings.init_from == "resume":
            raise UserError(f"--init_from=resume: there is no checkpoint in {folder}")
        return
    _check_same_model(trainer, state)
    trainer.core.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    trainer.iteration, trainer.best_val_loss = state["iter"], state["best_val_loss"]


def _check_same_model(trainer: Trainer, state: dict) -> None:
    where = f"the checkpoint in {trainer.settings.out_dir}"
    hint = "use --init_from=scratch or another --out_dir"
    for name in MODEL_KEYS:
        had, wanted = state["model_config"][name], getattr(trainer.settings, name)
        if had != wanted:
            raise UserError(f"{where} has {name}={had}, not {wanted}; {hint}")
    if state["chars"] != trainer.corpus.chars:
        raise UserError(f"{where} was trained on a text with other characters; {hint}")
