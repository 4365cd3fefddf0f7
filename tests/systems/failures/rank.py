"""What a rank uses: its place, its group, marks for the driver, the time at which it learned.

def work(me, argument):
    me.join()
    me.mark("ready")
    error = me.learn(lambda: forever(...))      # {"at": ..., "type": ..., "text": ...}
    return error

Times are time.monotonic(), one clock for all processes of the machine, also in namespaces.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

#: Far above everything that is measured.
TIMEOUT_S = 120.0


@dataclass
class Rank:
    rank: int
    world_size: int
    folder: Path
    store: tuple[str, int]
    #: Keys of this run in the store.
    prefix: str

    def open_store(self):
        import torch.distributed as dist

        host, port = self.store
        client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        return dist.PrefixStore(self.prefix, client)

    def join(self, timeout_s: float = TIMEOUT_S, prefix: str = "") -> None:
        import libddp.distributed as dist
        import torch.distributed as torch_dist

        store = self.open_store()
        if prefix:
            store = torch_dist.PrefixStore(prefix, store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def mark(self, name: str) -> None:
        """Tells the driver and the other ranks that this rank is so far."""
        (self.folder / f"{name}-{self.rank}").touch()

    def wait_for(self, name: str, deadline_s: float = TIMEOUT_S) -> None:
        """Until the driver or a rank has made this file."""
        end = time.monotonic() + deadline_s
        while not (self.folder / name).exists():
            if time.monotonic() > end:
                raise RuntimeError(f"{name} did not come")
            time.sleep(0.001)

    def learn(self, call) -> dict:
        """What `call` raises, and when."""
        began = time.monotonic()
        try:
            call()
        except (Exception, KeyboardInterrupt) as error:
            return {
                "began": began,
                "at": time.monotonic(),
                "type": type(error).__name__,
                "bases": [base.__name__ for base in type(error).__mro__],
                "text": str(error),
            }
        return {"began": began, "at": time.monotonic(), "type": None, "bases": [], "text": ""}


def main(run: dict) -> None:
    """Runs the function and leaves its result in the folder; lets its exception out."""
    me = Rank(
        run["rank"], run["world_size"], Path(run["folder"]), tuple(run["store"]), run["prefix"]
    )
    function = getattr(importlib.import_module(run["module"]), run["function"])
    outcome = {}
    try:
        outcome["value"] = function(me, *run["args"])
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        partial = me.folder / f"partial-{me.rank}"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(me.folder / f"result-{me.rank}")
        if run["quick_exit"] and "error" not in outcome:
            os._exit(0)
