"""Bad input to init_process_group: our error, at once or in bounded time, naming the cause."""

import builtins
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from libddp.errors import ArgumentError, NetworkError, PeerError, StateError, TimeoutError

from libddp import distributed as ddp_dist

SHORT = timedelta(seconds=2)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets exactly the given variables; nothing may stay initialised."""

    def apply(**values):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    apply()
    yield apply
    assert not dist.is_initialized()


@pytest.fixture
def port():
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def complete(port, **changes):
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    values.update(changes)
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(environment, port, name):
    environment(**complete(port, **{name: None}))
    with pytest.raises(ArgumentError, match=f"environment variable {name} is not set"):
        ddp_dist.init_process_group("gloo", timeout=SHORT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "zero"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "70000"),
        ("MASTER_ADDR", "tcp://127.0.0.1"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named_with_its_value(environment, port, name, value):
    environment(**complete(port, **{name: value}))
    with pytest.raises(ArgumentError) as caught:
        ddp_dist.init_process_group("gloo", timeout=SHORT)
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_rank_beyond_the_world_is_refused(environment, port):
    environment(**complete(port, RANK="2"))
    with pytest.raises(ArgumentError, match=r"RANK=2 contradicts WORLD_SIZE=2"):
        ddp_dist.init_process_group("gloo", timeout=SHORT)


def test_a_port_in_use_is_named(environment, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        environment(**complete(port))
        with pytest.raises(NetworkError, match=str(port)):
            ddp_dist.init_process_group("gloo", timeout=SHORT)


def test_a_master_that_does_not_answer_is_named_within_the_timeout(environment, port):
    environment(**complete(port, RANK="1"))
    with pytest.raises((NetworkError, TimeoutError), match=str(port)):
        ddp_dist.init_process_group("gloo", timeout=SHORT)


def test_a_rank_that_never_comes_is_named(environment, port):
    environment(**complete(port, WORLD_SIZE="3"))
    with pytest.raises(TimeoutError, match=r"1.*2") as caught:
        ddp_dist.init_process_group("gloo", timeout=SHORT)
    assert isinstance(caught.value, builtins.TimeoutError)
    assert isinstance(caught.value, dist.DistNetworkError)


def claim_rank_one():
    own = os.environ["RANK"]
    os.environ["RANK"] = "1"
    try:
        ddp_dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    finally:
        os.environ["RANK"] = own


def test_two_ranks_with_one_number_are_told_so():
    outcomes = ranks.launch(claim_rank_one, 2, deadline=90)
    assert all(outcome.failed and not outcome.timed_out for outcome in outcomes)
    assert any("rank 1" in outcome.message for outcome in outcomes)
    assert {outcome.error for outcome in outcomes} <= {"PeerError", "TimeoutError"}
    assert any(outcome.error == "PeerError" for outcome in outcomes)


def disagree_on_world_size():
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
    ddp_dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def test_world_sizes_that_differ_are_told():
    outcomes = ranks.launch(disagree_on_world_size, 2, deadline=90)
    assert all(outcome.failed and not outcome.timed_out for outcome in outcomes)
    assert any("world size" in o.message.replace("_", " ") for o in outcomes)


def refuse_to_begin(refuser, variable, value):
    if os.environ["RANK"] == refuser:
        os.environ[variable] = value
    started = time.monotonic()
    try:
        ddp_dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    finally:
        assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("refuser", "variable", "value", "words"),
    [
        ("1", "LIBDDP_SOCKETS_PER_LINK", "x", "LIBDDP_SOCKETS_PER_LINK='x' is not an integer"),
        ("0", "LIBDDP_HEARTBEAT_TIMEOUT", "-1", "LIBDDP_HEARTBEAT_TIMEOUT='-1' is not an integer"),
    ],
)
def test_a_rank_that_cannot_begin_tells_the_others(refuser, variable, value, words):
    outcomes = ranks.launch(refuse_to_begin, 2, refuser, variable, value, deadline=90)
    for rank, outcome in enumerate(outcomes):
        assert outcome.failed
        assert words in outcome.message, ranks.describe(outcome)
        if str(rank) == refuser:
            assert outcome.error == "ArgumentError"
        else:
            assert outcome.error == "PeerError"
            assert f"rank {refuser} (pid " in outcome.message
            assert "could not take part" in outcome.message


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"wire_dtype": "bfloat16"}, "wire_dtype='bfloat16' is a str"),
        ({"wire_dtype": torch.float16}, "wire_dtype=float16 is neither"),
        ({"sockets_per_link": 2.0}, r"sockets_per_link=2\.0 is not an int"),
        ({"sockets_per_link": 9}, "sockets_per_link=9 is not an integer from 1 to 8"),
    ],
)
def test_a_choice_of_links_that_cannot_be_is_named(argument, words):
    with pytest.raises(ArgumentError, match=words):
        ddp_dist.init_process_group("gloo", rank=0, world_size=1, **argument)


def test_the_names_that_torch_answers_are_taken():
    name = str(dist.BackendConfig(dist.Backend("gloo")))  # "cpu:gloo,cuda:gloo", ...
    assert "cuda:gloo" in name
    ddp_dist.init_process_group("cpu:gloo,cuda:gloo", rank=0, world_size=1)
    try:
        assert ddp_dist.get_backend() == "cpu:gloo,cuda:gloo"
        assert ddp_dist.native().size() == 1
    finally:
        ddp_dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("mpi", "is not known"),
        ("glo", "is not known"),
        ("cuda:mpi", "does not offer"),
        ("cpu:gloo,cpu:gloo", "twice"),
        (7, "is a int"),
    ],
)
def test_an_unknown_backend_lists_the_known(backend, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        ddp_dist.init_process_group(backend, rank=0, world_size=1)
    assert "gloo" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cuda:nccl", "cuda:gloo"])
def test_nccl_without_cuda_says_so(backend):
    with pytest.raises(ArgumentError, match="needs CUDA"):
        ddp_dist.init_process_group(backend, rank=0, world_size=1)


@pytest.mark.parametrize("timeout", [10, timedelta(0), timedelta(seconds=-1)])
def test_a_timeout_must_be_a_positive_timedelta(timeout):
    with pytest.raises(ArgumentError, match="timeout"):
        ddp_dist.init_process_group("gloo", rank=0, world_size=1, timeout=timeout)


def test_a_store_needs_rank_and_world_size():
    store = dist.HashStore()
    with pytest.raises(ArgumentError, match="world_size"):
        ddp_dist.init_process_group("gloo", store=store, rank=0)
    with pytest.raises(ArgumentError, match="rank"):
        ddp_dist.init_process_group("gloo", store=store, world_size=2)
    with pytest.raises(ArgumentError, match="both"):
        ddp_dist.init_process_group(store=store, init_method="env://", rank=0, world_size=1)


@pytest.mark.parametrize("method", ["udp://here", "tcp://127.0.0.1", "file://relative", "nonsense"])
def test_an_init_method_that_cannot_work_is_named(method):
    with pytest.raises(ArgumentError) as caught:
        ddp_dist.init_process_group("gloo", init_method=method, rank=0, world_size=2, timeout=SHORT)
    assert method in str(caught.value)


def test_a_second_init_and_a_missing_one_are_told():
    ddp_dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        with pytest.raises(ArgumentError, match="twice"):
            ddp_dist.init_process_group("gloo", rank=0, world_size=1)
    finally:
        ddp_dist.destroy_process_group()
    for call in (
        lambda: ddp_dist.all_reduce(torch.ones(1)),
        ddp_dist.native,
        ddp_dist.destroy_process_group,
        ddp_dist.get_backend,
    ):
        with pytest.raises(StateError, match="not initialised") as caught:
            call()
        assert isinstance(caught.value, ValueError)  # torch's class, which scripts catch


def test_errors_are_also_the_classes_that_scripts_catch():
    assert issubclass(PeerError, dist.DistBackendError)
    assert issubclass(PeerError, RuntimeError)
    assert issubclass(NetworkError, dist.DistNetworkError)


HOLDER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stopped_store(port):
    """A client of a store whose process is stopped."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        try:
            assert holder.stdout.readline() == b"ready\n"
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            holder.send_signal(signal.SIGSTOP)
            yield store
        finally:
            holder.kill()


def test_a_store_that_is_stopped_is_named_at_the_timeout(stopped_store, port):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=f"store at 127.0.0.1:{port} did not answer within"):
        ddp_dist.init_process_group(
            "gloo", store=stopped_store, rank=1, world_size=2, timeout=SHORT
        )
    assert time.monotonic() - start < 30


def test_ctrl_c_ends_a_call_to_a_store_that_is_stopped(stopped_store):
    start = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ddp_dist.init_process_group(
            "gloo", store=stopped_store, rank=1, world_size=2, timeout=timedelta(seconds=100)
        )
    assert time.monotonic() - start < 50
