"""What a sharded model is made of and leaves: state dicts, snapshots, deferred initialisation."""

import pytest
import torch
from subject import DEVICE, FSDP, IS_LIBDDP, fully_shard
from test_fsdp import sharded, wrapped
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import StateDictType
from training import build, train


def trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, steps, optimizer=optimizer)
    return optimizer


def on_host(state: dict) -> dict:
    return {
        name: value.full_tensor().cpu() if hasattr(value, "full_tensor") else value.cpu()
        for name, value in state.items()
    }


def bare_state(steps=3) -> dict:
    model = build()
    trained(model, steps)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def same(found: dict, wanted: dict) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_full_state_dict():
    model = wrapped()
    trained(model)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    assert all(value.device == DEVICE for value in state.values())
    same({name: value.cpu() for name, value in state.items()}, bare_state())


def test_full_state_dict_on_the_host():
    from torch.distributed.fsdp import FullStateDictConfig

    model = wrapped()
    trained(model)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert all(value.device.type == "cpu" for value in state.values())
    same(state, bare_state())


def test_sharded_state_dict_survives_a_file(tmp_path):
    model = wrapped()
    trained(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), tmp_path / "shard.pt")
    other = wrapped(build(seed=99))
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(torch.load(tmp_path / "shard.pt", weights_only=False))
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        same({name: value.cpu() for name, value in other.state_dict().items()}, bare_state())


def test_dtensors_in_state_dicts():
    model = sharded()
    trained(model)
    same(on_host(model.state_dict()), bare_state())


def test_dcp(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = sharded()
    optimizer = trained(model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    other = sharded(build(seed=99))
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    loaded = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, second),
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, second, loaded["optimizer"])
    assert train(other, 3, optimizer=second) == train(model, 3, optimizer=optimizer)


def test_full_state_into_a_sharded_model():
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = sharded(build(seed=99))
    set_model_state_dict(model, build(device="cpu").state_dict(), options=options)
    assert train(model) == train(build())


@pytest.mark.libddp
def test_snapshots(tmp_path):
    from libddp.distributed.fsdp import load_snapshot, save_safetensors, save_snapshot

    model = wrapped()
    optimizer = trained(model)
    save_snapshot(tmp_path / "snapshot", model, optimizer, {"step": 3})
    other = wrapped(build(seed=99))
    second = torch.optim.AdamW(other.parameters(), lr=1e-3)
    assert load_snapshot(tmp_path / "snapshot", other, second) == {"step": 3}
    assert train(other, 3, optimizer=second) == train(model, 3, optimizer=optimizer)
    save_safetensors(model, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 100_000


@pytest.mark.libddp
def test_a_snapshot_goes_between_devices(tmp_path):
    """Written from a GPU, read on the host, and the other way round."""
    from libddp.distributed.fsdp import load_snapshot, save_snapshot

    model = wrapped()
    trained(model)
    save_snapshot(tmp_path / "device", model)
    host = FSDP(build(seed=99, device="cpu"), device_id=torch.device("cpu"))
    load_snapshot(tmp_path / "device", host)
    with FSDP.state_dict_type(host, StateDictType.FULL_STATE_DICT):
        same(host.state_dict(), bare_state())
    save_snapshot(tmp_path / "host", host)
    again = wrapped(build(seed=98))
    load_snapshot(tmp_path / "host", again)
    with FSDP.state_dict_type(again, StateDictType.FULL_STATE_DICT):
        same({name: value.cpu() for name, value in again.state_dict().items()}, bare_state())


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
def test_deferred_initialisation(face):
    from gpt import Gpt

    with torch.device("meta"):
        model = Gpt(layers=2, width=64, heads=4)
    if face == "wrapper":
        kept = torch.zeros_like

        def init(module):
            module.to_empty(device=DEVICE, recurse=False)
            reset(module)
            if isinstance(module, Gpt):
                module.positions.data = kept(module.positions)

        model = FSDP(model, param_init_fn=init, device_id=DEVICE)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device=DEVICE)
        model.apply(reset)
        torch.nn.init.zeros_(model.positions)
    assert all(p.device == DEVICE for p in model.parameters())
    assert all(torch.tensor(train(model, 3)).isfinite())


def test_dtype_of_a_sharded_model_may_change():
    if not IS_LIBDDP:
        pytest.skip("a promise of libddp")
    model = sharded()
    trained(model, 2)
    model.to(torch.bfloat16)
    assert all(torch.tensor(train(model, 2)).isfinite())


def test_optimizer_state_is_on_the_device():
    model = sharded()
    optimizer = trained(model)
    for state in optimizer.state.values():
        assert state["exp_avg"].device == DEVICE
