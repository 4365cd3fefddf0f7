"""Checkpoints that every rank writes its part of, and that load on any number of ranks.

    store(trainer)        # all ranks
    restore(trainer)      # all ranks; the newest whole checkpoint, as --init_from says
    resume(trainer)       # then: a newer snapshot, if an earlier start has left one
    keep(trainer)         # all ranks; a snapshot, where one is due

OUT_DIR/checkpoints/iter_00000100/ holds torch's distributed checkpoint format (DCP) and run.json
(iteration, data order, shape of the network). It is written under another name, flushed, and
renamed when all ranks have finished; then `latest` is replaced, which names it. At every moment
`latest` names a whole checkpoint. With --checkpoint=full every tensor is written whole instead of
in parts; both kinds are read alike. Snapshots are libddp.Snapshot's, for the next start of the run.
"""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import engine as engines
import torch
import torch.distributed.checkpoint as dcp
from fsdp_trainer import FsdpTrainer
from shared import UserError, sync_folder

FORMAT = 1
FOLDER, LATEST, RUN = "checkpoints", "latest", "run.json"
NAME = re.compile(r"iter_\d{8}")
#: A checkpoint is of the same network if these are the same; dropout may change.
SHAPE = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias", "gelu")


def store(trainer: FsdpTrainer) -> Path:
    """Save the run's state; return the folder. Raises: UserError (the disk is full, ...)."""
    root = Path(trainer.options.out_dir) / FOLDER
    path = root / f"iter_{trainer.iteration:08d}"
    fresh = path.with_suffix(".new")
    _on_first(trainer, lambda: _empty(fresh))
    writer = dcp.FileSystemWriter(fresh, sync_files=True)
    try:
        dcp.save(_state(trainer, trainer.options.checkpoint), storage_writer=writer)
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        raise UserError(f"cannot write {fresh}: {_reason(error)}; {newest(root)}") from error
    _on_first(trainer, lambda: _publish(trainer, fresh, path))
    trainer.saved_at = trainer.iteration
    return path


def restore(trainer: FsdpTrainer) -> None:
    """Take up the newest checkpoint, as init_from says. Raises: UserError."""
    options = trainer.options
    root = Path(options.out_dir) / FOLDER
    if options.init_from == "scratch":
        return
    path = newest_folder(root)
    _agree(trainer, path)
    if path is None:
        if options.init_from == "resume":
            raise UserError(f"--init_from=resume: there is no checkpoint in {root}")
        return
    run = read_run(path)
    _check_same_model(trainer, run, path)
    kind = _kind(trainer, "sharded")
    _warm_up(trainer.optimizer)
    state = _state(trainer, kind)
    load_into(state, path)
    _take(trainer, state, kind)
    trainer.order.restore(run["order"])
    if trainer.scaler.is_enabled() and run["scaler"]:
        trainer.scaler.load_state_dict(run["scaler"])
    trainer.iteration = trainer.saved_at = run["iter"]


def resume(trainer: FsdpTrainer) -> None:
    """Take up the newest snapshot if it is newer than the checkpoint. Raises: UserError."""
    snapshots = trainer.snapshots
    if trainer.options.init_from == "scratch" or not snapshots.is_newer_than(trainer.iteration):
        return
    run = snapshots.load(trainer.model, trainer.optimizer, scaler=trainer.scaler)
    _check_same_model(trainer, run, Path(trainer.options.out_dir) / "snapshots")
    trainer.order.restore(run["order"])
    trainer.iteration = run["iter"]


def keep(trainer: FsdpTrainer) -> None:
    """Every SNAPSHOT_EVERY iterations in memory, every SNAPSHOT_STORAGE in the folder too."""
    run = {"iter": trainer.iteration, "order": trainer.order.state()}
    run["config"] = asdict(trainer.config)
    model, optimizer = trainer.model, trainer.optimizer
    trainer.snapshots.save(trainer.iteration, run, model, optimizer, scaler=trainer.scaler)


def _agree(trainer: FsdpTrainer, path: Path | None) -> None:
    """All ranks must go on from the same checkpoint. Raises: UserError."""
    found = -1 if path is None else int(path.name.rpartition("_")[2])
    every = trainer.gather([float(found)]).flatten().tolist()
    if min(every) != max(every):
        said = ", ".join(f"rank {r}: {int(n)}" for r, n in enumerate(every))
        raise UserError(
            f"the ranks find checkpoints of different iterations ({said}; -1: none); --out_dir="
            f"{trainer.options.out_dir} must be one folder that all of them see"
        )


def newest_folder(root: Path) -> Path | None:
    """The checkpoint that `latest` names, if there is one. Raises: UserError if it is not there."""
    if not (root / LATEST).exists():
        return None
    name = (root / LATEST).read_text(encoding="utf-8").strip()
    if not NAME.fullmatch(name) or not (root / name).is_dir():
        there = ", ".join(sorted(path.name for path in root.glob("iter_????????"))) or "none"
        raise UserError(f"{root / LATEST} names {name!r}, which is not there; there are: {there}")
    return root / name


def load_into(state: dict, path: Path, alone: bool = False) -> None:
    """Fill the tensors of `state`, each rank its parts. Raises: UserError.

    alone=True: this process reads by itself, without a process group.
    """
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=alone)
    except (OSError, RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise UserError(
            f"cannot read {path}: {_reason(error)}; the name of another checkpoint in "
            f"{path.parent / LATEST} goes back to that"
        ) from error


def _kind(trainer: FsdpTrainer, wanted: str) -> str:
    """Parameters that are not sharded, as on a single rank, have no parts to write."""
    alone = trainer.ranks.world == 1 or trainer.options.sharding_strategy == "NO_SHARD"
    return "full" if alone else wanted


def _state(trainer: FsdpTrainer, kind: str) -> dict:
    """Tensors only: names of parameters -> values, and -> {exp_avg, exp_avg_sq, step}."""
    with _state_type(trainer, _kind(trainer, kind)):
        model = trainer.model.state_dict()
        fsdp = trainer.engine.FullyShardedDataParallel
        optimizer = fsdp.optim_state_dict(trainer.model, trainer.optimizer)
    model.pop("head.weight", None)  # tied: it is token.weight
    return {"model": model, "optimizer": optimizer["state"]}


def _take(trainer: FsdpTrainer, state: dict, kind: str) -> None:
    """Put the values into model and optimizer; learning rates and betas stay as configured now."""
    fsdp = trainer.engine.FullyShardedDataParallel
    with _state_type(trainer, kind):
        groups = fsdp.optim_state_dict(trainer.model, trainer.optimizer)["param_groups"]
        state["model"]["head.weight"] = state["model"]["token.weight"]
        trainer.model.load_state_dict(state["model"])
        loaded = {"state": state["optimizer"], "param_groups": groups}
        loaded = fsdp.optim_state_dict_to_load(trainer.model, trainer.optimizer, loaded)
    trainer.optimizer.load_state_dict(loaded)


def _state_type(trainer: FsdpTrainer, kind: str):
    offload = trainer.ranks.device.type == "cuda"
    return engines.state_type(trainer.engine, trainer.model, kind, offload)


def _warm_up(optimizer: torch.optim.Optimizer) -> None:
    """A step that changes nothing makes the optimizer's state, which loading fills."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _publish(trainer: FsdpTrainer, fresh: Path, path: Path) -> None:
    """Rank 0, after all have written: the rename that makes the checkpoint count."""
    run = {"format": FORMAT, "iter": trainer.iteration, "world": trainer.ranks.world}
    run |= {"order": trainer.order.state(), "scaler": trainer.scaler.state_dict()}
    run |= {"config": asdict(trainer.config), "options": asdict(trainer.options)}
    _write_durably(fresh / RUN, json.dumps(run, indent=2))
    if path.exists():  # of a run that --init_from=scratch has given up
        os.replace(path, path.with_suffix(".old"))
    os.replace(fresh, path)
    _write_durably(path.parent / (LATEST + ".new"), path.name + "\n")
    os.replace(path.parent / (LATEST + ".new"), path.parent / LATEST)
    sync_folder(path.parent)
    for old in _outdated(path, trainer.options.keep_checkpoints):
        shutil.rmtree(old, ignore_errors=True)


def _outdated(path: Path, keep: int) -> list[Path]:
    """What goes when `path` is the newest: those long before it, and those of a run given up."""
    every = sorted(path.parent.glob("iter_????????"))
    before = [other for other in every if other.name <= path.name]
    after = [other for other in every if other.name > path.name]
    return before[:-keep] + after + list(path.parent.glob("iter_*.old"))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _on_first(trainer: FsdpTrainer, function) -> None:
    """Rank 0 calls it while the others wait. Raises: UserError on every rank if it cannot."""
    failure = None
    if trainer.ranks.rank == 0:
        try:
            function()
        except OSError as error:
            failure = error
    if trainer.gather([float(failure is not None)]).any():
        root = Path(trainer.options.out_dir) / FOLDER
        why = failure.strerror if failure else "rank 0 says why"
        raise UserError(f"cannot write into {root}: {why}; {newest(root)}") from failure


def newest(root: Path) -> str:
    """Words about what is left when a checkpoint could not be written."""
    if (root / LATEST).exists():
        return f"the checkpoint {(root / LATEST).read_text(encoding='utf-8').strip()} is intact"
    return "there is no earlier checkpoint"


def read_run(path: Path) -> dict:
    """run.json of a checkpoint. Raises: UserError."""
    try:
        run = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path / RUN}: {error}; --init_from=scratch starts anew"
        ) from error
    if run.get("format") != FORMAT:
        raise UserError(f"{path / RUN}: format {run.get('format')} is not known here")
    return run


def _check_same_model(trainer: FsdpTrainer, run: dict, path: Path) -> None:
    config = asdict(trainer.config)
    for name in SHAPE:
        if run["config"][name] != config[name]:
            raise UserError(
                f"the checkpoint {path} has {name}={run['config'][name]}, not {config[name]}; use "
                "--init_from=scratch or another --out_dir"
            )


def _reason(error: BaseException) -> str:
    """The first line that says something; DCP puts each rank's error below a heading."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {_reason(inner)}"
    return (str(error) or type(error).__name__).splitlines()[0]
