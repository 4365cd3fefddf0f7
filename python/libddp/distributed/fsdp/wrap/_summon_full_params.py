"""summon_full_params with torch's arguments and torch's refusals."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from libddp.distributed._exit import describe
from libddp.distributed.fsdp.wrap._errors import NotSupportedError
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._summoned_forward import SummonedForward
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, model_of
from libddp.errors import StateError


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


@contextmanager
def summoned(
    wrapped: WrappedModule,
    keep: bool,
    recurse: bool = True,
    with_gradients: bool = False,
    rank0_only: bool = False,
) -> Iterator[bool]:
    """_whole_parameters of `wrapped` and what is under it, where they are not whole already.

    Yields:
        Whether anything was not.
    """
    all_wrapped = wrapped_modules_in(wrapped.module) if recurse else [wrapped]
    wrapped_modules = [each for each in all_wrapped if each.summoned is None]
    if not wrapped_modules:
        yield False
        return
    group = wrapped.sharding.shard or wrapped.sharding.replicate
    here = not rank0_only or group is None or group.rank() == 0
    with _whole_parameters(wrapped, [s.unit for s in wrapped_modules], keep, with_gradients, here):
        for each in wrapped_modules:
            each.summoned = SummonedForward(here)
        try:
            yield True
        finally:
            for each in wrapped_modules:
                each.summoned = None


@contextmanager
def _whole_parameters(
    wrapped: WrappedModule, units: list, keep: bool, with_gradients: bool = False, here: bool = True
) -> Iterator[None]:
    """Parameters of `units`, some of `wrapped`'s model, show copies of whole tensors; a collective.

    Args:
        keep: changes of the copies become the parameters' values.
        with_gradients: `.grad` shows whole gradients too.
        here: on this rank too.
    """
    model = model_of(wrapped)
    group = wrapped.sharding.shard or wrapped.sharding.replicate
    try:
        for each in wrapped_modules_in(wrapped.module):
            each.check_places()
        model.show_copies(units, with_gradients=with_gradients, here=here)
    except StateError as error:
        if group is not None:  # whose ranks may wait
            group.report_error(f"in making parameters whole: {describe(error)}")
        raise
    try:
        yield
    except BaseException:
        model.end_copies(units, False)
        raise
    model.end_copies(units, keep)
