"""The modules of an example's folder, without their plain names staying behind.

mingpt = load("mingpt_ddp")
mingpt.model.GPT, mingpt.errors.UserError

The scripts of an example import each other by plain names (`model`, `trainer`), and two examples
may have modules of the same name. So they are imported with their folder in front, and then every
name means again what it meant before. Each folder is loaded once per process.
"""

import importlib
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).parents[3] / "examples"


@cache
def load(name: str) -> SimpleNamespace:
    """Every module of examples/`name`, as an attribute of its own name; `folder` is its path."""
    folder = EXAMPLES / name
    names = sorted(path.stem for path in folder.glob("*.py"))
    before = {n: sys.modules.pop(n) for n in names if n in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        modules = {n: importlib.import_module(n) for n in names}
    finally:
        sys.path.remove(str(folder))
        for n in names:
            sys.modules.pop(n, None)
        sys.modules.update(before)
    return SimpleNamespace(folder=folder, **modules)
