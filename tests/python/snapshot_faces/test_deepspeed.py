"""DLRover's DeepSpeedCheckpointer over DeepSpeed, and over an engine that makes its calls."""

import importlib.util
import json
import os
import signal
import sys
import types
from enum import IntEnum
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import zero_engine


class Scaler:
    """In the place of DeepSpeed's module of loss scalers."""

    def __init__(self, scale):
        self.cur_scale, self.dtype = scale, torch.float16


def put_scaler_in_place():
    """On the ranks only: others look whether DeepSpeed is installed."""
    module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
    module.Scaler = Scaler
    Scaler.__module__ = module.__name__
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules[module.__name__] = module


class Stage(IntEnum):
    TWO = 2


class FileEngine:
    """As DeepSpeed's TorchCheckpointEngine."""

    def makedirs(self, path, exist_ok=False):
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info):
        self.created = info

    def save(self, state_dict, path):
        torch.save(state_dict, path)

    def load(self, path, map_location=None):
        # Python 3.11.2 pickles members of enumerations by their names.
        with torch.serialization.safe_globals([Stage, Scaler, getattr]):
            return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info):
        return True


class Engine:
    """As a DeepSpeedEngine of ZeRO stage 2: rank 0 saves the module, each rank its moments."""

    def __init__(self, weight, moments):
        self.checkpoint_engine = FileEngine()
        self.weight, self.moments, self.global_steps = weight, moments, 0

    def _paths(self, folder, tag):
        return (
            os.path.join(folder, tag, "mp_rank_00_model_states.pt"),
            os.path.join(folder, tag, f"zero_pp_rank_{dist.get_rank()}_optim_states.pt"),
        )

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True):
        engine, (model, optimizer) = self.checkpoint_engine, self._paths(save_dir, tag)
        engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        engine.create(tag)
        if dist.get_rank() == 0:
            state = {"module": {"w": self.weight}, "global_steps": self.global_steps}
            engine.save({**state, **client_state}, model)
        scaler = Scaler(float(self.global_steps))
        state = {"zero_stage": Stage.TWO, "loss_scaler": scaler, "moments": self.moments}
        engine.save(state, optimizer)
        engine.commit(tag)
        if save_latest and dist.get_rank() == 0:
            Path(save_dir, "latest").write_text(tag)
        dist.barrier()

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True):
        tag = tag or Path(load_dir, "latest").read_text()
        model, optimizer = self._paths(load_dir, tag)
        state = self.checkpoint_engine.load(model)
        self.weight, self.global_steps = state["module"]["w"], state["global_steps"]
        state_of_rank = self.checkpoint_engine.load(optimizer)
        assert state_of_rank["zero_stage"] == Stage.TWO
        assert state_of_rank["loss_scaler"].cur_scale == self.global_steps
        assert state_of_rank["loss_scaler"].dtype == torch.float16
        self.moments = state_of_rank["moments"]
        return load_dir, {"epoch": state["epoch"]}


def at(step):
    rank = dist.get_rank()
    engine = Engine(torch.full((4,), float(step)), torch.full((3,), step + rank / 10))
    engine.global_steps = step
    return engine


def start(folder, engine):
    put_scaler_in_place()
    from libddp.flash_checkpoint import checkpointer
    from libddp.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

    from libddp import Snapshot

    checkpointer.Snapshot = lambda *args, **kwargs: Snapshot(*args, linger=45.0, **kwargs)
    return DeepSpeedCheckpointer(engine, folder)


def saves(folder):
    from libddp.distributed import init_process_group
    from libddp.flash_checkpoint.deepspeed import StorageType

    init_process_group("libddp")
    for step, kind in ((1, StorageType.DISK), (2, StorageType.MEMORY)):
        checkpointer = start(folder, at(step))
        checkpointer.save_checkpoint(folder, client_state={"epoch": step}, storage_type=kind)
    assert isinstance(checkpointer.engine.checkpoint_engine, FileEngine)


def loads(folder):
    from libddp.distributed import init_process_group
    from libddp.errors import ArgumentError

    init_process_group("libddp")
    checkpointer = start(folder, at(0))
    if dist.get_world_size() == 3:
        with pytest.raises(ArgumentError, match=r"what 2 ranks saved, here are 3\. Hint"):
            checkpointer.load_checkpoint(folder)
        checkpointer.close()
        return
    for tag, step in ((None, 2), ("global_step1", 1), ("global_step2", 2)):
        _, client = checkpointer.load_checkpoint(folder, tag=tag)
        engine, wanted = checkpointer.engine, at(step)
        assert client == {"epoch": step}
        assert engine.global_steps == step
        assert torch.equal(engine.weight, wanted.weight)
        assert torch.equal(engine.moments, wanted.moments)
    with pytest.raises(ArgumentError, match=r"int has no checkpoint_engine\. Hint"):
        start(folder, 3)


def test_memory_is_newer_than_the_disk(tmp_path):
    ranks.run(saves, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert not list(tmp_path.glob("global_step2/*"))
    ranks.run(loads, 2, str(tmp_path))
    assert len(list(tmp_path.glob("global_step2/*.pt"))) == 3
    ranks.run(loads, 3, str(tmp_path))


def zero_trains(folder, begins):
    """The losses of steps 0 to 5 of each stage, saved in between; or of those after the load."""
    from libddp.distributed import init_process_group
    from libddp.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType

    os.environ["DS_ACCELERATOR"] = "cpu"
    init_process_group("libddp")
    losses = {}
    for stage in (1, 2, 3):
        engine, place = zero_engine.make(stage), os.path.join(folder, str(stage))
        checkpointer = DeepSpeedCheckpointer(engine, place)
        if not begins:
            _, client = checkpointer.load_checkpoint(place)
            assert client["note"] == engine.global_steps == 4
        losses[stage] = []
        while engine.global_steps < 6:
            draws = torch.Generator().manual_seed(10 * engine.global_steps + dist.get_rank())
            losses[stage].append(zero_engine.step(engine, draws))
            kind = {2: StorageType.DISK, 4: StorageType.MEMORY}.get(engine.global_steps)
            if begins and kind is not None:
                note = {"note": engine.global_steps}
                checkpointer.save_checkpoint(place, client_state=note, storage_type=kind)
        if not begins:
            checkpointer.close()
    if begins:
        Path(folder, f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return losses


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed (pip install deepspeed); only a stand-in was tried",
)
def test_zero_goes_on_from_memory_with_the_same_losses(tmp_path):
    for outcome in ranks.launch(zero_trains, 2, str(tmp_path), True, deadline=180):
        assert outcome.returncode == -signal.SIGKILL, outcome.message
    resumed = ranks.run(zero_trains, 2, str(tmp_path), False, deadline=180)
    for rank, losses in enumerate(resumed):
        whole = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        assert losses == {int(stage): values[4:] for stage, values in whole.items()}
