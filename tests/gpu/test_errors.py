"""Bad input: named before anything starts, and the group goes on; what is recorded of a call."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch
from subject import DDP, DEVICE, FSDP, IS_CUDA, dist
from torch import nn

pytestmark = pytest.mark.libddp


def works() -> bool:
    """A group that has refused a call takes the next one."""
    out, tensor = torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE)
    dist.all_gather_into_tensor(out, tensor)
    dist.all_reduce(out, async_op=True).wait()
    return bool(out.eq(1).all())


@pytest.mark.cuda
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_host_and_device_tensors_in_one_call(is_async):
    host, device = torch.zeros(4), torch.zeros(4, device=DEVICE)
    for out, tensor in ((host, device), (device, host)):
        with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
            dist.all_gather_into_tensor(out, tensor, async_op=is_async)
        with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
            dist.all_gather([out], tensor, async_op=is_async)
        with pytest.raises(ValueError, match=r"cpu.*cuda|cuda.*cpu"):
            dist.reduce_scatter_tensor(out, tensor, async_op=is_async)
    assert works()


@pytest.mark.cuda
@pytest.mark.skipif(IS_CUDA and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_different_devices():
    one, other = torch.zeros(4, device="cuda:0"), torch.zeros(4, device="cuda:1")
    with pytest.raises(ValueError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        dist.all_gather_into_tensor(one, other)
    with pytest.raises(ValueError, match="cuda:1"):
        dist.all_reduce(other)  # a group has one device
    assert works()


def test_sizes_and_dtypes_that_do_not_fit():
    out, tensor = torch.zeros(5, device=DEVICE), torch.zeros(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[5\]"):
        dist.all_gather_into_tensor(out, tensor)
    with pytest.raises(ValueError, match="dtype"):
        dist.all_gather_into_tensor(torch.zeros(4, device=DEVICE, dtype=torch.int32), tensor)
    with pytest.raises(ValueError, match="rank"):
        dist.broadcast(tensor, 5)
    assert works()


@pytest.mark.cuda
@pytest.mark.parametrize("index", [99, -2])
def test_a_device_that_does_not_exist(index):
    with pytest.raises(ValueError, match=r"99|-2"):
        DDP(nn.Linear(2, 2).to(DEVICE), device_ids=[index])
    with pytest.raises(ValueError, match=r"99|-2"):
        FSDP(nn.Linear(2, 2), device_id=index)
    assert works()


@pytest.mark.cuda
def test_a_model_that_is_elsewhere():
    with pytest.raises(ValueError, match=r"cuda device 0, and the model is on cpu"):
        DDP(nn.Linear(2, 2), device_ids=[DEVICE.index])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(DEVICE))
    with pytest.raises(ValueError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
        DDP(mixed)
    assert works()


@pytest.fixture
def no_memory_left():
    """A function after whose call torch's allocator has 8 MiB more to give, and no more."""

    def restrict():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved() + 8 * 2**20) / total
        )

    yield restrict
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_out_of_memory_in_an_all_gather(no_memory_left):
    """It is torch's error, with sizes; when there is memory again the model goes on."""
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = FSDP(nn.Linear(4096, 4096), device_id=DEVICE, mixed_precision=precision)
    x = torch.ones(2, 4096, device=DEVICE)
    no_memory_left()
    with pytest.raises(RuntimeError, match=r"[MG]iB"):
        model(x)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert works()
    model(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.cuda
def test_out_of_memory_in_a_bucket(no_memory_left):
    """Buckets may lie in memory that is not torch's: then there is no error."""
    model, x = nn.Linear(4096, 4096).to(DEVICE), torch.ones(2, 4096, device=DEVICE)
    no_memory_left()
    words = "MiB"
    try:
        DDP(model)(x).sum().backward()
    except RuntimeError as error:
        words = str(error)
    assert "MiB" in words or "GiB" in words
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert works()
    DDP(model)(x).sum().backward()


def test_the_flight_log_has_device_calls():
    tensor = torch.ones(3, 5, device=DEVICE)
    dist.all_reduce(tensor, async_op=True).wait()
    last = None
    end = time.monotonic() + 5
    while time.monotonic() < end:
        last = dist.flight_log()["groups"][0]["operations"][-1]
        if last["state"] == "done":
            break
        time.sleep(0.05)
    assert (last["kind"], last["dtype"], last["count"]) == ("all_reduce", "float32", 15)
    assert last["state"] == "done"
    assert 0 < last["called_ns"] <= last["started_ns"] <= last["finished_ns"]


@pytest.mark.cuda
def test_calls_after_the_end_of_a_group():
    group = dist.new_group([0])
    tensor = torch.ones(4, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    with pytest.raises((ValueError, RuntimeError), match="group"):
        dist.all_reduce(tensor, group=group)
    assert works()


#: What a script that starts by itself begins with.
HEAD = """
import torch, sys
from libddp import distributed as dist
"""


def run(program: str, **variables: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout


@pytest.mark.launches
def test_no_device_is_visible():
    """NCCL alone is refused; without a name the group is one of the host."""
    status, text = run('dist.init_process_group("nccl")', CUDA_VISIBLE_DEVICES="")
    assert status, text
    assert "needs CUDA" in text
    program = "dist.init_process_group()\nt = torch.ones(2)\ndist.all_reduce(t)\n"
    program += "dist.destroy_process_group()\nprint('fine', t.tolist())"
    status, text = run(program, CUDA_VISIBLE_DEVICES="")
    assert status == 0, text
    assert "fine [1.0, 1.0]" in text


@pytest.mark.cuda
@pytest.mark.launches
def test_device_id_that_does_not_exist():
    status, text = run('dist.init_process_group("nccl", device_id=torch.device("cuda", 99))')
    assert status, text
    assert "ArgumentError" in text
    assert "cuda:99" in text


@pytest.mark.cuda
@pytest.mark.launches
def test_a_graph_of_a_destroyed_group():
    """Either destroying says that a graph still has the group, or replaying it works on."""
    program = """
dist.init_process_group("nccl")
group = dist.new_group([0])
out, tensor = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
dist.all_gather_into_tensor(out, tensor, group=group)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dist.all_gather_into_tensor(out, tensor, group=group)
try:
    dist.destroy_process_group(group)
    graph.replay()
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "graph" in str(error), error
del graph
torch.cuda.synchronize()
dist.destroy_process_group()
print("fine")
"""
    status, text = run(program)
    assert status == 0, text
    assert "fine" in text


@pytest.mark.cuda
@pytest.mark.launches
def test_two_ranks_on_one_device_without_permission():
    """Each says so, names the other, and does not hang."""
    import ranks

    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": None, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    for outcome in ranks.launch(share_a_device, 2, env=environment, deadline=50):
        assert outcome.failed
        assert not outcome.timed_out, outcome.output
        assert re.search(r"ranks (0 and 1|1 and 0) use one device", outcome.message)
        assert "set_device(LOCAL_RANK)" in outcome.message


def share_a_device():
    from libddp.distributed import all_reduce, init_process_group

    torch.cuda.set_device(0)
    init_process_group("nccl")
    all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.launches
def test_the_command_line_says_what_is_built():
    done = subprocess.run(
        [sys.executable, "-m", "libddp", "--version"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert "CUDA" in lines
    if IS_CUDA:
        assert torch.version.cuda in lines["CUDA"]
        assert lines["NCCL"].split(".")[0].isdigit()
