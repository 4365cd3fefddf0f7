"""The Python package's modules import without a cycle, and only what docs/design.md allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import tree

PACKAGE = "libddp"
#: Modules that are built and import nothing of the package.
BUILT = {f"{PACKAGE}._C", f"{PACKAGE}._build"}
#: room -> (its modules, with what is under them; rooms that it may import). docs/design.md has the
#: same table ("Python packages"). A module belongs to the longest name that fits.
ROOMS = {
    "leaves": (
        {
            "errors",
            "_epochs",
            "_version",
            "_load",
            "_objects",
            "_process_states",
            "_upload",
            "_whole_file",
            "_torch_backend",
            "_torch_patches",
            "_program_line",
            "_command_line",
        },
        set(),
    ),
    "worker": (
        {"_worker", "_last_words", "_lifeline", "_steps", "_fork_server", "_spare_workers"},
        {"leaves"},
    ),
    "group": ({"distributed"}, {"worker", "leaves"}),
    "activation": ({"utils", "distributed.algorithms"}, {"leaves"}),
    "ddp": ({"nn"}, {"group", "leaves"}),
    "registry": ({"distributed.fsdp._registry"}, set()),
    "patches": (
        {
            "distributed.fsdp._clip",
            "distributed.fsdp._optimizer_steps",
            "distributed.fsdp._scaler",
            "distributed.fsdp._unaveraged",
            "distributed.fsdp._whole_tensor_optimizers",
            "_torch_patches.clip_grad_norm",
            "_torch_patches.grad_scaler",
        },
        {"registry", "leaves"},
    ),
    "wrap": (
        {"distributed.fsdp.wrap"},
        {"patches", "registry", "ddp", "group", "leaves"},
    ),
    "state": ({"distributed.fsdp.state"}, {"wrap", "leaves"}),
    "snapshot": ({"distributed.fsdp.snapshot"}, {"state", "wrap", "group", "leaves"}),
    "fsdp": (
        {"distributed.fsdp", "_torch_patches.checkpoint_state"},
        {"snapshots", "snapshot", "state", "wrap", "patches", "group", "leaves"},
    ),
    "snapshots": ({"snapshot"}, {"snapshot", "state", "wrap", "group", "leaves"}),
    "faces": (
        {
            "flash_checkpoint",
            "snapshot.accelerate",
            "snapshot.dcp",
            "snapshot.lightning",
            "snapshot.transformers",
        },
        {"snapshots", "leaves"},
    ),
    "optim": ({"optim"}, {"patches", "registry", "ddp", "group", "leaves"}),
    "plan": ({"plan"}, {"activation", "leaves"}),
    "elastic": ({"elastic"}, {"group", "worker", "leaves"}),
    "drop_in": (
        {
            "_autoload",
            "_torch_patches.activation_checkpointing",
            "_torch_patches.backward_engine",
            "_torch_patches.ddp",
            "_torch_patches.drop_in",
            "_torch_patches.fsdp",
            "_torch_patches.process_group",
            "_torch_patches.total_norm",
        },
        {"fsdp", "patches", "registry", "activation", "ddp", "group", "leaves"},
    ),
    "launcher": (
        {
            "run",
            "_attempts",
            "_dlrover_flags",
            "_failure_report",
            "_hosts",
            "_in_place",
            "_in_place_worker",
            "_launcher_flags",
            "_meetings",
            "_network_check",
            "_pidfds",
            "_preload",
            "_rendezvous",
            "_run_key",
            "_signpost",
            "_standby",
            "_status",
            "_store_sockets",
            "_worker_ends",
        },
        {"drop_in", "worker", "leaves"},
    ),
    "commands": (
        {"__init__", "__main__", "_consolidate", "_overlap", "_snapshot_command"},
        {"launcher", "drop_in", "plan", "snapshots", "fsdp", "snapshot", "worker", "leaves"},
    ),
}


@cache
def modules() -> dict[str, str]:
    """Dotted name of each module of the package -> its path."""
    paths = tree.files(".py", under=f"python/{PACKAGE}/")
    return {name_of(path): path for path in paths}


def name_of(path: str) -> str:
    name = path.removeprefix("python/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def for_type_checkers(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_names(node: ast.AST) -> Iterator[str]:
    """What the code under a node imports, in functions too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))
    children = node.orelse if for_type_checkers(node) else ast.iter_child_nodes(node)
    for child in children:
        yield from imported_names(child)


def imports_of(text: str, known) -> set[str]:
    """The modules among `known` that a module with this text imports."""
    found = set()
    for name in imported_names(ast.parse(text)):
        while name and name not in known and name not in BUILT:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", *BUILT}


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports_of(tree.read(path), known) - {name} for name, path in known.items()}


def room_of(module: str) -> str | None:
    """None for a module that stands in no room."""
    own = "__init__" if module == PACKAGE else module.removeprefix(f"{PACKAGE}.")
    fitting = [
        (len(name), room)
        for room, (names, _) in ROOMS.items()
        for name in names
        if own == name or own.startswith(f"{name}.")
    ]
    return max(fitting)[1] if fitting else None


def test_modules_import_without_cycles():
    assert len(graph()) > 100, "the parser finds no modules any more"
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_rooms_import_without_cycles():
    TopologicalSorter({room: rooms for room, (_, rooms) in ROOMS.items()}).prepare()


def test_every_module_stands_in_a_room():
    assert not [module for module in modules() if room_of(module) is None]


def test_rooms_import_only_what_the_design_allows():
    wrong = []
    for module, imported in graph().items():
        room = room_of(module)
        for other in imported:
            if room_of(other) not in {room, *ROOMS[room][1]}:
                wrong.append(f"{module} imports {other}")
    assert not sorted(wrong)


def test_rooms_name_what_is_there():
    known = {"__init__", *(name.removeprefix(f"{PACKAGE}.") for name in modules())}
    assert not [name for names, _ in ROOMS.values() for name in names if name not in known]
    used = {
        (room_of(module), room_of(other)) for module, names in graph().items() for other in names
    }
    allowed = {(room, other) for room, (_, rooms) in ROOMS.items() for other in rooms}
    assert not allowed - used, "arrows that nothing needs any more"


def test_the_design_names_the_same_rooms():
    section = tree.read("docs/design.md").partition("### Python packages")[2].partition("\n## ")[0]
    said = {}
    for room, names, rooms in re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|", section, re.M):
        said[room] = (set(re.findall(r"`([\w.]+)`", names)), set(re.findall(r"\w+", rooms)))
    assert said == ROOMS


def test_the_parser_sees_every_kind_of_import():
    known = {f"libddp.{name}" for name in "abcdef"}
    text = (
        "import libddp.a\n"
        "from libddp import b\n"
        "from libddp.c import something\n"
        "if TYPE_CHECKING:\n    from libddp import hidden, a\nelse:\n    from libddp import d\n"
        "def f():\n    from libddp.e import x\n    import_module('libddp.f')\n"
    )
    assert imports_of(text, known) == known
    assert not imports_of("if typing.TYPE_CHECKING:\n    from libddp import a\n", known)
