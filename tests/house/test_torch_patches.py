"""What libddp replaces of torch's is in libddp._torch_patches."""

import ast

import tree

PATCHES = "python/libddp/_torch_patches/"
#: Finds modules by libddp's path; in the table.
FINDER = "python/libddp/distributed/_torch_modules.py"


def torchs_names(module: ast.Module) -> set[str]:
    """What the imports of a file bind to something of torch's."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            mine = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {alias.asname or "torch" for alias in mine}
    return names


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement, or a call of setattr, assigns to."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return [target for target in node.targets if not isinstance(target, ast.Name)]
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [] if isinstance(node.target, ast.Name) else [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        return [node.args[0]] if node.func.id in ("setattr", "delattr") else []
    return []


def root_of(node: ast.expr) -> str | None:
    """`a` of `a.b[c].d`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def assignments(text: str) -> list[int]:
    """Lines that assign to something of torch's."""
    module = ast.parse(text)
    names = torchs_names(module)
    nodes = [(node, target) for node in ast.walk(module) for target in targets_of(node)]
    return sorted(node.lineno for node, target in nodes if root_of(target) in names)


def test_the_check_finds_what_it_looks_for():
    found = assignments(
        "import torch\n"
        "import torch.nn.utils.clip_grad as torchs\n"
        "from torch.autograd import Variable\n"
        "torch.x = torchs.y\n"
        "setattr(torchs, name, 1)\n"
        "Variable._execution_engine = mine\n"
        "mine.x = torch.x\n"
        "torch = 1\n"
    )
    assert found == [4, 5, 6]


def test_only_the_patches_assign_to_what_is_torchs():
    files = [p for p in tree.files(".py", under="python/libddp/") if not p.startswith(PATCHES)]
    wrong = [f"{path}:{line}" for path in files for line in assignments(tree.read(path))]
    for path in files:
        words = ["cell_contents", "_execution_engine ="]
        words += [] if path == FINDER else ["sys.meta_path"]
        wrong += [f"{path}: {word}" for word in words if word in tree.read(path)]
    assert not wrong
