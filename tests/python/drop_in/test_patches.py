"""The table of what libddp replaces of torch's: all of it, when it is there, and that it goes."""

from pathlib import Path

import drop_in
import pytest
from libddp._torch_patches import PATCHES
from libddp._torch_patches.replacing import DROP_IN

DOCS = Path(__file__).parents[3] / "docs"

#: Imports all that can be replaced; where() looks up what stands at the targets now.
LOOK_UP = """
import sys
from importlib import import_module

import torch
import torch.distributed as dist
from libddp._torch_patches import BY_DROP_IN, PATCHES

def owner(name):
    if name == "sys.modules":
        return sys.modules
    try:
        return import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        return getattr(owner(parent), last)

def where(asked_for_by=BY_DROP_IN):
    found = {}
    for patch in PATCHES:
        if patch.asked_for_by != asked_for_by:
            continue
        for place in map(owner, patch.owners):
            for name in patch.names:
                key = (getattr(place, "__name__", "sys.modules"), name)
                if isinstance(place, dict):
                    found[key] = place[name]
                elif hasattr(place, name):
                    found[key] = getattr(place, name)
    return found

def differences(before, after):
    assert before.keys() == after.keys()
    return {key for key in before if before[key] is not after[key]}
"""


def python(code: str, folder) -> None:
    done = drop_in.run(["-c", LOOK_UP + code], folder)
    assert done.returncode == 0, done.stdout


def rows() -> str:
    lines = [
        "| torch's | becomes | nothing less will do, because | asked for by |",
        "|---|---|---|---|",
    ]
    for patch in PATCHES:
        names = ", ".join(f"`{name}`" for name in patch.names)
        owners = ", ".join(f"`{owner}`" for owner in patch.owners)
        cells = (f"{names} of {owners}", patch.becomes, patch.reason, patch.asked_for_by)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_documentation_shows_the_table():
    assert rows() in (DOCS / "drop_in.md").read_text(encoding="utf-8")


def test_nothing_is_listed_twice():
    targets = [target for patch in PATCHES for target in patch.targets()]
    assert len(targets) == len(set(targets))


def test_what_is_not_listed_cannot_be_replaced():
    import torch

    with pytest.raises(LookupError, match=r"torch.add is not in the table"):
        DROP_IN.put(torch, "add", torch.sub)
    with pytest.raises(LookupError, match="clip_grad_norm_ is not in the table"):
        DROP_IN.put(torch.nn.utils, "clip_grad_norm_", torch.add)  # somebody else asks for it


OWN_MODELS = """
before = where()
engine, total_norm = torch._C._ImperativeEngine, torch.nn.utils.clip_grad._get_total_norm
from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard
from libddp.nn.parallel import DistributedDataParallel

dist.init_process_group("libddp", store=dist.HashStore(), rank=0, world_size=1)
makers = (
    DistributedDataParallel,
    FullyShardedDataParallel,
    fully_shard,
    lambda module: fully_shard(module, use_dtensor=False),
)
for make in makers:
    model = make(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert type(torch.autograd.Variable._execution_engine) is engine
    assert torch.nn.utils.clip_grad._get_total_norm is total_norm
    assert torch.nn.utils.get_total_norm is total_norm
assert differences(before, where()) == set()
"""


def test_without_the_drop_in_libddps_own_models_change_none_of_it(tmp_path):
    python(OWN_MODELS, tmp_path)


ON_AND_OFF = """
if {early_look}:
    before = where()
import libddp
torchs_engine = torch.autograd.Variable._execution_engine
torchs_norm = torch.nn.utils.clip_grad._get_total_norm
torchs_ddp = torch.nn.parallel.DistributedDataParallel
for _ in range(2):
    libddp.install()
    import libddp.distributed.fsdp
    during = where()
    libddp.uninstall()
    after = where()
    if {early_look}:
        assert differences(before, after) == set(), differences(before, after)
    kept = differences(after, during) ^ set(after)
    assert kept <= {{
        ("torch._dynamo.convert_frame", "DistributedDataParallel"),
        ("torch.distributed._composable.replicate", "DistributedDataParallel"),
        ("torch.distributed.checkpoint.state_dict", "FSDP"),
    }}, kept
    assert torch.autograd.Variable._execution_engine is torchs_engine
    assert torch.nn.utils.clip_grad._get_total_norm is torchs_norm
    for found in after.values():
        if hasattr(found, "__module__"):
            assert not found.__module__.startswith("libddp"), found
    assert torch._dynamo.convert_frame.DistributedDataParallel is torchs_ddp
"""


@pytest.mark.parametrize("is_early", [True, False], ids=["imported before", "imported after"])
def test_install_and_uninstall_leave_nothing(is_early, tmp_path):
    python(ON_AND_OFF.format(early_look=is_early), tmp_path)


OTHER_ENGINE = """
import libddp

class Other(torch._C._ImperativeEngine):
    pass

other = torch.autograd.Variable._execution_engine = Other()
libddp.install()
assert torch.autograd.Variable._execution_engine is other
libddp.uninstall()
assert torch.autograd.Variable._execution_engine is other
"""


def test_an_engine_of_somebody_else_stays(tmp_path):
    python(OTHER_ENGINE, tmp_path)


SHARDED = """
from torch.nn.utils import clip_grad_norm_ as early

import torch.distributed.checkpoint.state_dict
from libddp._torch_patches import BY_SHARDING
from libddp.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("libddp", store=dist.HashStore(), rank=0, world_size=1)
before = where(BY_SHARDING)
fully_shard(torch.nn.Linear(2, 2))
assert differences(before, where(BY_SHARDING)) == set()
model = FullyShardedDataParallel(torch.nn.Linear(2, 2))
replaced = {name for _, name in differences(before, where(BY_SHARDING))}
assert replaced >= {"_unscale_grads_", "_get_model_state_dict", "_load_optim_state_dict"}, replaced
assert early is torch.nn.utils.clip_grad_norm_  # behind its name
cell = dict(zip(early.__code__.co_freevars, early.__closure__)).get("func")
assert cell is None or cell.cell_contents.__wrapped__.__module__ == "torch.nn.utils.clip_grad"
"""


def test_sharding_plain_tensors_asks_for_norms_scaler_and_state_dicts(tmp_path):
    python(SHARDED, tmp_path)
