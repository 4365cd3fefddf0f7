"""summon_full_params with torch's arguments and torch's refusals."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from libddp.distributed.fsdp.state._state_dict import summoned
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, wrapped_modules_in
from libddp.errors import ArgumentError


class NotSupportedError(ArgumentError, NotImplementedError):
    """What torch refuses too, with the class that torch raises."""


@dataclass
class SummonArguments:
    """Arguments of summon_full_params."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def check(self, wrapped_modules: list[WrappedModule]) -> None:
        """Refuses on every rank what cannot be; warns as torch does."""
        if not wrapped_modules:
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
        if self.offload_to_cpu and any(
            wrapped.sharding.shard is None for wrapped in wrapped_modules
        ):
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
def summon(
    wrapped_modules: list[WrappedModule], recurse: bool, arguments: SummonArguments
) -> Iterator[None]:
    """Whole parameters of `wrapped_modules`, and of what is under them; a collective."""
    arguments.check(
        [inner for wrapped in wrapped_modules for inner in wrapped_modules_in(wrapped.module)]
    )
    with ExitStack() as stack:
        for wrapped in wrapped_modules:
            stack.enter_context(
                summoned(
                    wrapped,
                    keep=arguments.writeback,
                    recurse=recurse,
                    with_gradients=arguments.with_grads,
                    rank0_only=arguments.rank0_only,
                )
            )
        yield
