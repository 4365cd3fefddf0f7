"""A rank that shows the description of another version of the library."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as torch_dist


class Rewriting(torch_dist.Store):
    """A store in which what this rank writes has other words."""

    def __init__(self, store, old: bytes, new: bytes):
        super().__init__()
        self.store, self.old, self.new = store, old, new

    def set(self, key, value):
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.store.set(key, value.replace(self.old, self.new))

    def get(self, key):
        return self.store.get(key)

    def add(self, key, amount):
        return self.store.add(key, amount)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, timeout=timedelta(seconds=60)):
        self.store.wait(keys, timeout)

    def delete_key(self, key):
        return self.store.delete_key(key)

    deleteKey = delete_key


def join_as_another(me, odd_rank: int, old: str, new: str) -> dict:
    import libddp.distributed as dist

    store = me.open_store()
    if me.rank == odd_rank:
        store = Rewriting(store, old.encode(), new.encode())
    return me.learn(
        lambda: dist.init_process_group(
            "gloo",
            store=store,
            rank=me.rank,
            world_size=me.world_size,
            timeout=timedelta(seconds=20),
        )
    )
