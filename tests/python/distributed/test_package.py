"""The package itself: torch's signatures, stubs, command line, loading."""

import ast
import builtins
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from libddp.__main__ import main

import libddp
from libddp import _load, errors
from libddp import distributed as ddp_dist

OURS = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "destroy_process_group",
    "get_backend",
    "init_process_group",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
    "split_group",
]


def parameters(function):
    """Names, kinds and defaults of the public parameters."""
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if not p.name.startswith("_")
    ]


@pytest.mark.parametrize("name", OURS)
def test_our_functions_have_torchs_signatures(name):
    ours, theirs = getattr(ddp_dist, name), getattr(dist, name)
    assert ours is not theirs
    assert ours.__doc__
    common = len(parameters(theirs))
    assert parameters(ours)[:common] == parameters(theirs)
    taken = inspect.signature(ours).parameters
    assert set(inspect.signature(theirs).parameters) <= set(taken), "torchtitan passes _ranks"
    # What only newer versions of torch have comes after that, and is optional.
    assert all(
        default is not inspect.Parameter.empty for _, _, default in parameters(ours)[common:]
    )


def test_every_other_name_is_torchs_own():
    own = {*OURS, "allocate", "flight_log", "from_c10d", "init_device_mesh", "native"}
    for name in set(ddp_dist.__all__) - own:
        assert getattr(ddp_dist, name) is getattr(dist, name, getattr(dist.device_mesh, name, None))
    # not listed, found all the same
    assert ddp_dist.all_gather_coalesced is dist.all_gather_coalesced
    with pytest.raises(AttributeError, match=r"neither libddp.distributed nor torch.distributed"):
        ddp_dist.all_produce  # noqa: B018


def test_the_api_table_lists_the_public_names():
    docs = Path(__file__).parents[3] / "docs" / "api.md"
    text = docs.read_text()
    missing = [name for name in ddp_dist.__all__ if f"`{name}`" not in text]
    assert not missing


def public(namespace) -> set[str]:
    return {name for name in dir(namespace) if not name.startswith("_")}


def test_stubs_cover_the_extension():
    tree = ast.parse((Path(libddp.__file__).parent / "_C.pyi").read_text())
    stubs = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            stubs[node.name] = {getattr(n, "name", None) for n in node.body} | {
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign)
            }
            for base in node.bases:
                stubs[node.name] |= stubs.get(ast.unparse(base)) or set()
        elif isinstance(node, ast.FunctionDef):
            stubs[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            stubs[node.target.id] = None
    stubs = {name: of for name, of in stubs.items() if not name.startswith("_")}
    module = _load.load()
    assert public(module) == set(stubs)
    for name, members in stubs.items():
        if members is not None:
            known = members | set(dir(BaseException)) if name == "StopReplay" else members
            assert public(getattr(module, name)) <= known, name


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("ArgumentError", (dist.DistError, ValueError)),
        ("StateError", (dist.DistError, RuntimeError)),
        ("StoreError", (dist.DistStoreError,)),
        ("NetworkError", (dist.DistNetworkError,)),
        ("TimeoutError", (dist.DistNetworkError, builtins.TimeoutError)),
        ("PeerError", (dist.DistBackendError,)),
        ("DeviceError", (dist.DistBackendError,)),
        ("SnapshotError", (dist.DistError, RuntimeError)),
    ],
)
def test_errors_subclass_torchs_and_the_builtins(name, bases):
    error = getattr(libddp, name)
    assert error is getattr(errors, name)
    assert all(issubclass(error, base) for base in (*bases, errors.Error))
    assert str(error("the text")) == "the text"


def test_version_tells_all_that_a_bug_report_needs(capsys):
    assert main(["--version"]) == 0
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["libddp"] == libddp.__version__
    assert torch.__version__ in lines["torch"]
    assert set(lines) >= {"CUDA", "NCCL", "compiler", "SIMD", "Python"}


def test_cmake_dir_is_the_package(capsys):
    assert main(["--cmake-dir"]) == 0
    assert Path(capsys.readouterr().out.strip()) == Path(libddp.__file__).parent


def test_an_unknown_option_ends_with_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--no-such-option"])
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_another_torch_is_told_before_the_linker_fails(monkeypatch):
    monkeypatch.setattr(_load, "built_for", lambda: "1.2.3")
    _load.load.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"built for torch 1\.2\.3, but torch"):
            _load.load()
    finally:
        _load.load.cache_clear()


LAZY = """
import sys
import torch
import libddp._autoload as autoload
autoload.register(); autoload.register()
import torch.distributed as dist
assert "libddp" in dist.Backend.backend_list and dist.Backend("libddp") == "libddp"
assert "libddp._C" not in sys.modules and "libddp.distributed" not in sys.modules
dist.init_process_group("libddp", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(2); dist.all_reduce(t)
assert t.tolist() == [1, 1]
dist.destroy_process_group()
"""


def test_registering_loads_nothing_until_a_group_is_made():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
