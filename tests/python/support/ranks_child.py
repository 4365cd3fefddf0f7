"""A rank of ranks.run: loads the test file, calls the function, writes down what came of it."""

import importlib.util
import os
import pickle
import sys
import traceback
from pathlib import Path


def load(path: str):
    """The test file as module `ranks_target`, with its folder and this one importable."""
    sys.path[:0] = [str(Path(path).parent), str(Path(__file__).parent)]
    spec = importlib.util.spec_from_file_location("ranks_target", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_target"] = module
    spec.loader.exec_module(module)
    return module


def outcome_of(path: str, name: str, args: tuple) -> dict:
    try:
        return {"value": getattr(load(path), name)(*args)}
    except Exception as error:
        traceback.print_exc()
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return {"error": type(error).__name__, "message": str(error), "bases": bases}


def main(path: str) -> None:
    folder = Path(path)
    outcome = outcome_of(*pickle.loads((folder / "call").read_bytes()))
    partial = folder / f"partial-{os.environ['RANK']}"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(folder / f"result-{os.environ['RANK']}")
