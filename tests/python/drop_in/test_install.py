"""install() and uninstall(): what they replace, and what they say of what stays torch's."""

import sys

import drop_in
import pytest
from libddp._torch_patches import after_import

from libddp import run


def python(code: str, folder, **variables) -> str:
    done = drop_in.run(["-c", code], folder, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


NAMES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn import parallel

places = [(o, n) for o in (dist, c10d) for n in ("init_process_group", "new_group")]
places += [(dist, "get_backend"), (dist, "monitored_barrier")]
places += [(parallel, "DistributedDataParallel")]
places += [(parallel.distributed, "DistributedDataParallel")]
def owners():
    return {getattr(o, n).__module__.partition(".")[0] for o, n in places}
before = [getattr(o, n) for o, n in places]
assert owners() == {"torch"}

import libddp
libddp.install(); libddp.install()
assert owners() == {"libddp"}, owners()
assert sys.modules.get("torch.distributed.fsdp") is None  # takes seconds
dist.init_process_group(None, store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "gloo", dist.get_backend()
sub = c10d.new_group([0], backend="cpu:gloo,cuda:nccl")
assert dist.get_backend(sub) == "cpu:gloo,cuda:nccl"
ours = parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=sub, device_ids=[0])
assert isinstance(ours, before[-1]) and isinstance(ours, libddp.nn.parallel.DistributedDataParallel)
assert "module.weight" in ours.state_dict()
from torch.distributed.checkpoint.state_dict import get_model_state_dict
assert list(get_model_state_dict(ours)) == ["weight", "bias"]
assert ours._get_ddp_logging_data()["world_size"] == 1
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except libddp.ArgumentError as error:
    assert "twice" in str(error)
else:
    raise AssertionError("a second group")
dist.destroy_process_group()

libddp.uninstall(); libddp.uninstall()
assert [getattr(o, n) for o, n in places] == before
from libddp._torch_patches import after_import
left = set(after_import._waiting)
# By libddp's class.
assert left <= {"torch._dynamo.trace_rules", "torch.distributed.pipelining.stage"}, left
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    libddp.install()
except libddp.StateError as error:
    assert "too late" in str(error) and "gloo" in str(error), error
else:
    raise AssertionError("installed over another group")
assert owners() == {"torch"}
"""


def test_names_are_replaced_once_and_given_back(tmp_path):
    python(NAMES, tmp_path)


KEPT = """
import warnings
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as EarlyFsdp, fully_shard
from torch.nn.parallel import DistributedDataParallel as Early
import libddp; libddp.install()
import torch.distributed as dist

def said(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in found if "libddp:" in str(w.message)]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed._composable import replicate  # makes torch's on purpose
assert said(lambda: replicate(torch.nn.Linear(2, 2))(torch.ones(1, 2))) == []
first = said(lambda: Early(torch.nn.Linear(2, 2)))
assert len(first) == 1 and "torch's own, with torch's reducer" in first[0], first
assert "Hint: call libddp.install() before" in first[0]
assert said(lambda: Early(torch.nn.Linear(2, 2))) == []
assert said(lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))) == []

mesh = dist.init_device_mesh("cpu", (1,))
layer = torch.nn.Linear(2, 2)
first = said(lambda: fully_shard(layer, mesh=mesh))
assert len(first) == 1 and "this FSDP is torch's own" in first[0], first
assert said(lambda: fully_shard(torch.nn.Linear(2, 2), mesh=mesh)) == []
layer(torch.ones(1, 2)).sum().backward()
outer = EarlyFsdp(EarlyFsdp(torch.nn.Linear(2, 2), device_id="cpu"), device_id="cpu")
assert len(EarlyFsdp.fsdp_modules(outer)) == 2
outer(torch.ones(1, 2)).sum().backward()

ours = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
torch.compile(ours, backend="eager")(torch.ones(3, 2)).sum().backward()
assert ours.module.bias.grad.tolist() == [3, 3]
try:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))
except libddp.ArgumentError as error:
    assert "meta" in str(error) and "Hint" in str(error), error
else:
    raise AssertionError("a model that is not on the CPU")
dist.destroy_process_group()
for backend, text in ("nccl", "needs CUDA"), ("mpi", "'mpi' is not known"):
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except libddp.ArgumentError as error:
        assert text in str(error) and "Hint" in str(error), error
    else:
        raise AssertionError(backend)
"""


def test_what_stays_torchs_is_said_once(tmp_path):
    python(KEPT, tmp_path)


FIRST = """
import libddp.errors
import torch
assert torch.nn.parallel.DistributedDataParallel.__module__.startswith("libddp")
import libddp; libddp.uninstall()
assert torch.nn.parallel.DistributedDataParallel.__module__.startswith("torch")
"""


def test_the_variable_installs_whichever_is_imported_first(tmp_path):
    python(FIRST, tmp_path, LIBDDP_DROP_IN="1")
    done = drop_in.run(["-c", "import libddp"], tmp_path, LIBDDP_DROP_IN="please")
    assert done.returncode != 0
    assert "LIBDDP_DROP_IN='please' is not known. Hint: set it to 1 or 0." in done.stdout


def test_a_module_is_handed_over_at_the_end_of_its_import(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    # libddp itself may wait for modules of torch in this process.
    monkeypatch.setattr(after_import, "_waiting", {})
    others = [finder for finder in sys.meta_path if finder is not after_import._Finder]
    monkeypatch.setattr(sys, "meta_path", others)
    found = []
    after_import.call("late_module", lambda module: found.append(module.value))
    assert found == []
    import late_module

    assert found == [1]
    after_import.call("late_module", lambda module: found.append(module))
    assert found == [1, late_module]
    after_import.call("never_imported", drop := found.append)
    assert after_import._Finder in sys.meta_path
    after_import.forget([drop])
    assert after_import._Finder not in sys.meta_path


def refusal(*arguments: str) -> str:
    with pytest.raises(ValueError) as caught:
        run.wish_drop_in(run.parse(["--drop-in", *arguments, "train.py"]))
    assert "Hint: " in str(caught.value)
    return str(caught.value)


def test_what_would_keep_it_from_the_workers_is_an_error(monkeypatch):
    monkeypatch.delenv("LIBDDP_DROP_IN", raising=False)
    assert "--no-python" in refusal("--no-python")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbids it" in refusal()
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr("libddp._torch_patches.drop_in.entry_points", lambda group: ())
    assert "no entry point" in refusal()
    monkeypatch.setenv("PYTHON_EXEC", "/no/such/python")
    assert "PYTHON_EXEC=/no/such/python is not the Python" in refusal()


CHECKPOINT = """
import torch
import libddp; libddp.install()
import torch.utils.checkpoint as utils
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from libddp.utils import checkpoint as ours

names = ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts")
assert all(getattr(utils, name) is getattr(ours, name) for name in names)
layer = wrapper.checkpoint_wrapper(torch.nn.Linear(2, 2))
assert type(layer).__module__.startswith("libddp"), type(layer)
layer(torch.ones(1, 2)).sum().backward()
assert layer.bias.grad.tolist() == [1, 1]

@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(x):
    return utils.checkpoint(torch.exp, x, use_reentrant=False)

x = torch.ones(2, requires_grad=True)
compiled(x).sum().backward()
assert torch.equal(x.grad, x.detach().exp())
libddp.uninstall()
assert utils.checkpoint.__module__ == "torch.utils.checkpoint"
assert type(wrapper.checkpoint_wrapper(torch.nn.Linear(2, 2))).__module__.startswith("torch")
"""


def test_activation_checkpointing_is_replaced(tmp_path):
    python(CHECKPOINT, tmp_path)


SHARDING = """
import sys
import torch
import torch.distributed as dist

torch.cuda.is_available = lambda: {cuda}
import libddp; libddp.install()
import torch.distributed.checkpoint.state_dict as states
import torch.distributed.fsdp as package
from torch.distributed._composable import fsdp as composable
from torch.distributed._composable.fsdp.fully_shard import fully_shard as deep
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as Long
from torch.distributed.fsdp.fully_sharded_data_parallel import MixedPrecision

def owner(found):
    return sys.modules[found.__module__].__name__.partition(".")[0]

names = [FSDPModule, FullyShardedDataParallel, fully_shard, deep, composable.fully_shard]
names += [package.register_fsdp_forward_method, package.UnshardHandle]
assert [owner(name) for name in names] == ["libddp"] * 7, names
assert Long is FullyShardedDataParallel
assert owner(states.FSDP) == "torch"
assert package.MixedPrecision is MixedPrecision
libddp.uninstall()
for name in ("FullyShardedDataParallel", "fully_shard", "FSDPModule"):
    assert owner(getattr(package, name)) == "torch", name
assert package.fully_sharded_data_parallel.FullyShardedDataParallel is states.FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as Again
assert Again is states.FSDP
"""


@pytest.mark.parametrize("cuda", [False, True])
def test_sharding_is_replaced_with_and_without_cuda(cuda, tmp_path):
    python(SHARDING.format(cuda=cuda), tmp_path)


def test_libddps_package_may_be_imported_first(tmp_path):
    code = "import libddp; libddp.install(); import libddp.distributed.fsdp as ours; "
    code += "import torch; from torch.distributed.fsdp import fully_shard; "
    code += "assert fully_shard is ours.fully_shard"
    python(code, tmp_path)
