"""Sharded state through torch's distributed checkpoint, on another number of ranks."""

import checks
import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import StateDictType


def sharded(model, optimizer):
    """What DCP saves, and loads into."""
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    with fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optim": fsdp.optim_state_dict(model, optimizer)}


def whole(model, optimizer):
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    return {"model": model.state_dict(), "optim": fsdp.optim_state_dict(model, optimizer)["state"]}


def save(folder):
    """Trains, saves, and returns what was saved in whole tensors."""
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    model = models.wrap(models.build(lambda: models.TinyGpt(layers=1, width=36)))
    optimizer = models.adamw(model.parameters())
    models.train(model, 2, lambda _: optimizer)
    dcp.save(sharded(model, optimizer), checkpoint_id=folder)
    state = whole(model, optimizer)
    destroy_process_group()
    return state


def load(folder):
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    model = models.wrap(models.build(lambda: models.TinyGpt(layers=1, width=36), seed=5))
    optimizer = models.adamw(model.parameters())
    models.train(model, 1, lambda _: optimizer)
    state = sharded(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model_state, optim_state = state["model"], state["optim"]
    with fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(model_state)
        fsdp.optim_state_dict_to_load(model, optimizer, optim_state, load_directly=True)
    found = whole(model, optimizer)
    destroy_process_group()
    return found


def check_local_states_are_not_taken_for_whole_ones():
    """As plain tensors they were: a checkpoint had those of one rank for all."""
    fsdp, folder = models.libddp_fsdp().FullyShardedDataParallel, checks.shared_folder()
    source, target = models.wrap(), models.wrap(models.build(seed=5))
    for model in (source, target):
        fsdp.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    dcp.save(source.state_dict(), checkpoint_id=folder)
    state = target.state_dict()
    dcp.load(state, checkpoint_id=folder)
    target.load_state_dict(state)
    for model in (source, target):
        fsdp.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    assert_same(target.state_dict(), source.state_dict())


def flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def assert_same(found, wanted):
    found, wanted = dict(flat(found)), dict(flat(wanted))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("path", [(3, 1)])
def test_another_number_of_ranks(tmp_path, path):
    before, after = path
    wanted = ranks.run(save, before, str(tmp_path / "saved"))[0]
    for found in ranks.run(load, after, str(tmp_path / "saved")):
        assert_same(found, wanted)


results, test_on_two_ranks = checks.suite(globals(), 2)
