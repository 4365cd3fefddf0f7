"""Tensors that the package makes are where it says, whatever the script's default device is."""

import ast

import tree

FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}
#: Surveys models that are on no device.
SURVEY = "python/libddp/plan/"


def without_device(path: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(tree.read(path))):
        function = getattr(node, "func", None)
        if not isinstance(function, ast.Attribute) or function.attr not in FACTORIES:
            continue
        is_torchs = isinstance(function.value, ast.Name) and function.value.id == "torch"
        if is_torchs and all(keyword.arg != "device" for keyword in node.keywords):
            found.append(f"{path}:{node.lineno}: torch.{function.attr}")
    return found


def test_factories_name_a_device():
    paths = [path for path in tree.files(".py", under="python/libddp/")]
    assert not [
        line for path in paths if not path.startswith(SURVEY) for line in without_device(path)
    ]
