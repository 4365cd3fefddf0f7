"""libddp.Snapshot: saves to memory and to a folder, and what of them is whole."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from libddp import _epochs
from libddp._load import load
from libddp.distributed._from_c10d import from_c10d
from libddp.distributed._groups import find
from libddp.distributed.fsdp.state import _collective_errors
from libddp.errors import ArgumentError, SnapshotError, StateError
from libddp.snapshot import _place, _random
from libddp.snapshot._expected import expected_pieces, state_parts
from libddp.snapshot._pieces import Piece, StoredBy
from libddp.snapshot._replicated import MODEL
from libddp.snapshot._sharded import ShardedState
from libddp.snapshot._values import Encoder, decode

_C = load()
_log = logging.getLogger("libddp.snapshot")
#: As a process_group: this process alone, whatever groups there are.
ALONE: Any = object()
#: As an extra: None itself.
NO_EXTRA: Any = object()
#: Of the values of a rank.
_FORMAT = 1
#: Keys of tensors that are no model's: each rank's own, and those that ranks have in common.
_OWN, _STATE = "rank-{}.", "state."


class Stateful(Protocol):
    """A scaler, scheduler or sampler."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class SaveReport:
    """What a save was."""

    step: int
    #: Bytes that this rank has copied.
    bytes: int
    #: Seconds for which the training stood still.
    stall: float
    #: It goes into the folder.
    is_stored: bool


class Snapshot:
    """Saves that survive the death of any process of the job, and are loaded by its next start.

    A save copies model and optimizer, with checksums, into memory that a small process of each
    host keeps (the keeper); with `storage=True` the keeper stores it in the folder behind the
    training. At every moment one save is whole on all ranks. `load` takes the newest that is: from
    memory, else from the folder, with any number of ranks; bytes that are damaged are named, and
    the next older save is taken.

    Args:
        folder: where snapshots are stored; one that all ranks see and that is this job's alone,
            or an address that fsspec knows ("s3://bucket/run"). None: memory only.
        keep: snapshots that stay in the folder.
        replicas: 1 sends saves to the next host too, behind the training. When a host is lost the
            job goes on from the newest save that has arrived there, which is the newest one unless
            saves come faster than copies; several hosts with a run key (docs/security.md).
        run: which job this is, so that its next start finds its memory: at most 40 letters, digits,
            "-" and "_". None: the folder says it, else the launcher (TORCHELASTIC_RUN_ID,
            SLURM_JOB_ID), else the process that started this one.
        linger: seconds for which the memory stays when no process of the job is there.
        process_group: of the ranks; None = the default group; this process alone without one.
        random: the states of random number generators are saved and restored, too.
        in_memory: False: nothing is kept in memory, and no keeper is there. `save(storage=True)`
            returns when the folder has it, which takes no memory beside what is saved.

    Raises:
        ArgumentError: an argument that does not do; an address whose library is not installed.

    Note:
        Making one, `save`, `load` and `wait` are collectives. What fails on one rank raises on all,
        and the save before it stays.

    Example:
        >>> snapshot = Snapshot("out/run")  # doctest: +SKIP
        >>> extra = snapshot.load(model, optimizer)  # doctest: +SKIP
        >>> snapshot.save(100, model, optimizer, extra={"epoch": 3}, storage=True)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        *,
        keep: int = 2,
        replicas: int = 0,
        run: str | None = None,
        linger: float = 60.0,
        process_group: dist.ProcessGroup | None = None,
        random: bool = True,
        in_memory: bool = True,
    ) -> None:
        self._group = _group_of(process_group)
        self._random = random
        place = _place.of(folder)
        self._core = _C.Snapshot(
            group=self._group,
            folder=place.folder,
            objects=place.objects,
            helper=place.helper,
            environment=place.environment,
            keep=keep,
            replicas=replicas,
            run=run or "",
            linger=linger,
            num_threads=0,
            in_memory=in_memory,
        )
        self._pid = os.getpid()
        self._is_closed = False
        _open_snapshots.add(self)

    @torch.no_grad()
    def save(
        self,
        step: int,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        state: Any = None,
        storage: bool = False,
        **stateful: Stateful,
    ) -> SaveReport:
        """Saves the step; returns when the copy is made.

        Args:
            step: the same on all ranks; any number, also one that was saved before.
            model: plain, DistributedDataParallel, FullyShardedDataParallel or fully_shard.
            optimizer: of the model's parameters.
            extra: this rank's own: values of JSON, tuples, sets, bytes, numbers and arrays of
                numpy, tensors, in dicts and lists. None = {}.
            state: in place of a model: a dict that all ranks have alike, of which each host keeps
                its first rank's.
            storage: it is stored in the folder, behind the training. While one is being stored, a
                newer one takes the place of those that wait.
            stateful: what else has a state_dict (scaler=, scheduler=, sampler=): this rank's own.

        Returns:
            What it was, with the time that the training stood still.

        Raises:
            ArgumentError: steps differ, a value or tensor that cannot be kept; names it.
            StateError: the memory does not suffice for two copies (with the numbers), no keeper.
        """
        self._check_open()
        _note_step(step)
        pieces, values = self._together(
            f"save step {step}", lambda: self._collect(model, optimizer, extra, state, stateful)
        )
        report = self._core.save(
            step,
            [piece.for_core() for piece in pieces],
            json.dumps(values, allow_nan=False),
            storage,
        )
        return SaveReport(*report)

    @torch.no_grad()
    def load(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int | None = None,
        **stateful: Stateful,
    ) -> Any:
        """Loads the newest save that is whole into what is given.

        Args:
            model: with the parameters of the one that was saved, wrapped like it or otherwise.
            optimizer: of its parameters; one that has made no step yet will do.
            step: of the save. None: any.
            stateful: those that were saved, by the same names.

        Returns:
            The `extra` of this rank ({} for None); the `state` of a save without a model. Where the
            job had fewer ranks, further ones get what rank 0 had. {} where there is no save at all.

        Raises:
            SnapshotError: there are saves, and all of them are damaged; says what is wrong with
                each. Model and optimizer may then be filled in part.
            ArgumentError: the save is of another model or optimizer; names what differs. Nothing
                has been changed.

        Note:
            Where there is no save yet, it calls prepare(model, optimizer).
        """
        self._check_open()
        attempts = _C.LoadAttempts()
        for version in self._core.versions():
            if step not in (None, version.step):
                continue
            try:
                found = self._load_version(version, model, optimizer, stateful)
            except ArgumentError as error:
                if not attempts.pass_over(str(error), is_damaged=False):
                    raise
                continue
            except SnapshotError as error:
                _log.warning("libddp snapshot: passed over: %s", error)
                attempts.pass_over(str(error), is_damaged=True)
                continue
            if attempts.has_passed_over:
                _log.warning("libddp snapshot: %s", attempts.went_on(version.name))
            return found
        attempts.check()
        if model is not None:
            self._prepare(model, optimizer)
        return {}

    @torch.no_grad()
    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Begins with the memory of the first save, behind the training.

        The kernel clears pages before it gives them away, which takes several times as long as the
        copy. `load` calls it where it finds nothing; call it where there is no `load`. Moments that
        torch's Adam, AdamW and SGD and libddp's AdamW will make are counted. Nothing where two
        copies of the state would not fit; the save then says so.

        Raises:
            ArgumentError: a tensor that cannot be kept.
        """
        self._check_open()
        pieces = self._together("prepare", lambda: expected_pieces(model, optimizer))
        self._core.prepare([piece.for_core() for piece in pieces])

    def latest_step(self) -> int | None:
        """The step of the newest save that is there, else None. A collective."""
        self._check_open()
        versions = self._core.versions()
        return versions[0].step if versions else None

    def wait(self, timeout: float = 1800.0) -> None:
        """Until the newest save with `storage=True` is in the folder.

        Raises:
            SnapshotError: it could not be stored, on any rank; says why. Older ones stay.
            TimeoutError: after `timeout` seconds.
        """
        self._check_open()
        self._core.wait(timeout)

    def close(self) -> None:
        """The job has reached its end: memory is let go, and what is being stored is stored.

        A program that ends without an exception calls it as it ends.
        """
        if not self._is_closed and os.getpid() == self._pid:
            self._is_closed = True
            self._core.close()

    def status(self) -> dict[str, Any]:
        """What this host's keeper holds and stores (docs/snapshots.md); no collective."""
        self._check_open()
        return json.loads(self._core.status()) or {}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind, value, trace) -> None:
        if kind is None:
            self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError("libddp snapshot: it is closed. Hint: make another one.")

    def _leave(self) -> None:
        """The group is gone, and this process goes on in another one: what is kept stays."""
        self._is_closed = True
        self._core = self._group = None

    def _together(self, what: str, function):
        return _collective_errors.together([self._group], what, function, of="snapshot")

    def _prepare(self, model, optimizer) -> None:
        """What cannot be kept is the first save's to say."""
        try:
            self.prepare(model, optimizer)
        except ArgumentError as error:
            _log.info("libddp snapshot: not prepared: %s", error)

    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def _collect(self, model, optimizer, extra, state, stateful):
        if (model is not None or optimizer is not None) and state is not None:
            raise ArgumentError(
                "libddp snapshot: save takes a model or a state, not both. Hint: put what belongs "
                "to the model into extra."
            )
        own, common = Encoder(_OWN.format(self._rank())), Encoder(_STATE)
        values: dict[str, Any] = {"format": _FORMAT}
        if state is not None:
            values["state"] = common.encode(state, "state")
        else:
            extra = {} if extra is None else None if extra is NO_EXTRA else extra
            values["extra"] = own.encode(extra, "extra")
        if self._random:
            values["random"] = own.encode(_random.state(), "random")
        values["stateful"] = {
            name: own.encode(_state_of(name, each), name) for name, each in stateful.items()
        }
        pieces = []
        if model is not None or optimizer is not None:
            parts = state_parts(model, optimizer)
            pieces, others, aliases = parts.model_pieces()
            moments, settings = parts.optimizer_pieces()
            pieces += moments
            values["model"] = common.encode({"values": others, "aliases": aliases}, "model")
            values["optimizer"] = common.encode(settings, "optimizer")
        pieces += [Piece.whole(k, t, StoredBy.EACH_RANK) for k, t in own.tensors.items()]
        pieces += [Piece.whole(k, t, StoredBy.FIRST_OF_HOST) for k, t in common.tensors.items()]
        return pieces, values

    def _load_version(self, version, model, optimizer, stateful) -> Any:
        _note_step(version.step)
        self._core.open(version)
        values = self._together(f"read the values of {version.name}", lambda: _values_of(version))
        stored = version.tensors
        parts = None
        if model is not None or optimizer is not None:
            parts = state_parts(model, optimizer)
            if isinstance(parts, ShardedState):
                parts.prepare()

        def prepare():
            _check_stateful(version, values, stateful)
            return self._wanted(version, values, stored, parts, optimizer)

        others, pieces, moments = self._together(f"load {version.name}", prepare)
        self._core.read(
            version, [piece.for_core() for piece in [*others.values(), *pieces, *moments]]
        )
        tensors = {key: piece.tensor for key, piece in others.items()}
        finish = lambda: self._take_over(values, tensors, parts, optimizer, moments, stateful)  # noqa: E731
        return self._together(f"load {version.name}", finish)

    def _wanted(self, version, values, stored, parts, optimizer):
        keys = _tensor_keys(values)
        others = {
            key: Piece.whole(
                key,
                torch.empty(stored[key][1], dtype=stored[key][0], device="cpu"),
                StoredBy.EACH_RANK,
            )
            for key in keys
            if key in stored
        }
        missing = [key for key in keys if key not in stored]
        if missing:
            raise SnapshotError(f"libddp snapshot: {version.name} has no {missing[0]!r} here.")
        if parts is None:
            return others, [], []
        if "model" not in values:
            raise ArgumentError(
                f"libddp snapshot: {version.name} has a state and no model. Hint: load() without a "
                "model returns it."
            )
        pieces = parts.model_pieces()[0]
        _check_model(version, pieces, stored)
        moments = parts.wanted_of_optimizer(stored) if optimizer is not None else []
        if optimizer is not None and not values["optimizer"]:
            raise ArgumentError(
                f"libddp snapshot: {version.name} has no optimizer. Hint: load it without one."
            )
        return others, pieces, moments

    def _take_over(self, values, tensors, parts, optimizer, moments, stateful) -> Any:
        if parts is not None:
            parts.load_model_values(decode(values["model"], tensors)["values"])
            if optimizer is not None:
                parts.load_optimizer(moments, decode(values["optimizer"], tensors))
        for name, each in stateful.items():
            each.load_state_dict(decode(values["stateful"][name], tensors))
        found = decode(values.get("state", values.get("extra")), tensors)
        if self._random and "random" in values:
            _random.restore(decode(values["random"], tensors))
        return found


_open_snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()


def _close_at_exit() -> None:
    """A program that fails is to be started again, and finds its memory."""
    if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
        for snapshot in list(_open_snapshots):
            try:
                snapshot.close()
            except Exception as error:  # nobody is there to catch it
                _log.warning("libddp snapshot: %s", error)


atexit.register(_close_at_exit)


def _leave_open_ones() -> None:
    for snapshot in list(_open_snapshots):
        snapshot._leave()
    _open_snapshots.clear()


_epochs.before_next(_leave_open_ones)


def _group_of(process_group):
    if process_group is ALONE:
        return None
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    return find(process_group) or from_c10d(process_group)


def _note_step(step: int) -> None:
    """For a launcher that has to tell whether a failure comes again at the same step."""
    worker = sys.modules.get("libddp._worker")
    if worker is not None and hasattr(worker, "note_step"):
        worker.note_step(step)


def _state_of(name: str, each: Stateful) -> dict[str, Any]:
    if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
        raise ArgumentError(
            f"libddp snapshot: {name}={type(each).__name__} has no state_dict and load_state_dict. "
            "Hint: put values into extra."
        )
    return each.state_dict()


def _values_of(version) -> dict[str, Any]:
    values = json.loads(version.values)
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ArgumentError(
            f"libddp snapshot: {version.name} was not saved by libddp.Snapshot of this version. "
            "Hint: a C++ program loads what its Snapshot::save has saved; a TrainingState's loads "
            "here, too."
        )
    return values


def _check_stateful(version, values: dict[str, Any], wanted: dict[str, Stateful]) -> None:
    for name in wanted:
        if name not in values["stateful"]:
            raise ArgumentError(
                f"libddp snapshot: {version.name} has no {name!r}. Hint: it has "
                f"{', '.join(values['stateful']) or 'none'}; save it with {name}=."
            )


def _tensor_keys(tree: Any) -> list[str]:
    """Of all tensors in encoded values."""
    if isinstance(tree, list):
        return [key for item in tree if type(item) in (list, dict) for key in _tensor_keys(item)]
    if not isinstance(tree, dict):
        return []
    for kind in ("$tensor", "$array"):
        if len(tree) == 1 and kind in tree:
            return [tree[kind]]
    return list(dict.fromkeys(key for item in tree.values() for key in _tensor_keys(item)))


def _check_model(version, pieces: list[Piece], stored: dict[str, tuple]) -> None:
    wanted = {piece.key for piece in pieces}
    for key in stored:
        if key.startswith(MODEL) and key not in wanted:
            raise ArgumentError(
                f"libddp snapshot: {version.name} has {key.removeprefix(MODEL)!r}, which the model "
                "has not. Hint: load into the model that was saved."
            )


__all__ = ["SaveReport", "Snapshot", "Stateful"]
