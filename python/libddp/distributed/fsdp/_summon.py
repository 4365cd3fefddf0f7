"""summon_full_params with torch's arguments and torch's refusals."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from libddp.distributed.fsdp import _shards
from libddp.distributed.fsdp._state_dict import summoned
from libddp.errors import ArgumentError


class NotSupportedError(ArgumentError, NotImplementedError):
    """What torch refuses too, with the class that torch raises."""


@dataclass
class Wish:
    """Arguments of summon_full_params."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def check(self, shards: list[_shards.Shard]) -> None:
        """Refuses on every rank what cannot be; warns as torch does."""
        if not shards:
            return
        if self.with_grads and self.offload_to_cpu:
            raise NotSupportedError(
                "libddp fsdp: summon_full_params: with_grads=True and offload_to_cpu=True exclude "
                "each other. Hint: parameters are on the CPU anyway."
            )
        if self.writeback and self.rank0_only:
            raise NotSupportedError(
                "libddp fsdp: summon_full_params: writeback=True and rank0_only=True together "
                "is not supported: the other ranks do not see the changes. Hint: pass "
                "writeback=False."
            )
        if self.offload_to_cpu and any(shard.sharding.shard is None for shard in shards):
            raise NotSupportedError(
                "libddp fsdp: summon_full_params: offload_to_cpu=True has no meaning with "
                "NO_SHARD. Hint: leave it out."
            )
        if self.offload_to_cpu and not self.rank0_only:
            warnings.warn(
                "libddp fsdp: offload_to_cpu=True and rank0_only=False copy whole parameters on "
                "every rank. Hint: pass rank0_only=True and writeback=False where one rank is "
                "enough.",
                stacklevel=4,
            )


@contextmanager
def summon(shards: list[_shards.Shard], recurse: bool, wish: Wish) -> Iterator[None]:
    """Whole parameters of `shards`, and of what is under them; a collective."""
    wish.check([inner for shard in shards for inner in _shards.shards_in(shard.module)])
    with ExitStack() as stack:
        for shard in shards:
            stack.enter_context(
                summoned(
                    shard,
                    keep=wish.writeback,
                    recurse=recurse,
                    with_gradients=wish.with_grads,
                    rank0_only=wish.rank0_only,
                )
            )
        yield
