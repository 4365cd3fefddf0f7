"""Methods of torch's FSDPModule that have nothing to do here, or cannot be had.

A row is a method: its signature is torch's, by a function that does nothing but refuse what torch
refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from libddp.distributed.fsdp._argument_checks import check_bool, check_count, check_sharded
from libddp.errors import ArgumentError

#: name -> (signature, why it has no effect).
_WITHOUT_EFFECT: dict[str, tuple[Callable, str]] = {
    "set_is_last_backward": (
        lambda self, is_last_backward: None,
        "every pass ends by itself",
    ),
    "set_modules_to_forward_prefetch": (
        lambda self, modules: check_sharded("set_modules_to_forward_prefetch", modules),
        "the next module is known from the first step",
    ),
    "set_modules_to_backward_prefetch": (
        lambda self, modules: check_sharded("set_modules_to_backward_prefetch", modules),
        "the next module is known from the first step",
    ),
    "set_manual_backward_finalization": (
        lambda self, enabled: None,
        "every pass that averages ends by itself",
    ),
    "set_keep_unsharded_storage": (
        lambda self, keep, *, recurse=True: None,
        "there are no graphs of GPUs that would need it",
    ),
    "set_separate_reduce_scatter_group": (
        lambda self, enable=True, *, recurse=True: None,
        "gathers and reductions are queued so that neither waits for the other",
    ),
    "set_reduce_scatter_max_input_buffers": (
        lambda self, max_input_buffers, *, recurse=True: check_count(
            "max_input_buffers", max_input_buffers
        ),
        "at most two units' whole gradients are there at a time",
    ),
    "set_symm_mem_for_comm": (
        lambda self, *args, **kwargs: None,
        "flat arrays lie in the group's memory anyway",
    ),
    "set_reshard_after_forward": (
        lambda self, reshard_after_forward, recurse=True: check_bool(
            "reshard_after_forward", reshard_after_forward
        ),
        "as the module was sharded",
    ),
    "set_reshard_after_backward": (
        lambda self, reshard_after_backward, *, recurse=True: None,
        "parameters are resharded after each use",
    ),
    "set_unshard_in_backward": (
        lambda self, unshard_in_backward: None,
        "parameters are unsharded where they are used",
    ),
    "set_requires_all_reduce": (
        lambda self, requires_all_reduce, *, recurse=True: None,
        "each pass that averages does it over all ranks, to the same sums",
    ),
    "set_force_sum_reduction_for_comms": (
        lambda self, enable: None,
        "how an average is computed is the same for all strategies",
    ),
    "set_allocate_memory_from_process_group_for_comm": (
        lambda self, enable: None,
        "flat arrays lie in the group's memory anyway",
    ),
    "_set_unshard_async_op": (
        lambda self, async_op: None,
        "every gather is asynchronous",
    ),
}
#: name -> signature; libddp's own collectives move what is sharded.
_REFUSED: dict[str, Callable] = {
    "set_custom_all_gather": lambda self, comm: None,
    "set_custom_reduce_scatter": lambda self, comm: None,
}


def with_methods_without_effect(cls: type) -> type:
    """Gives the class these methods; help() says of each why it does nothing."""
    for name, (method, reason) in _WITHOUT_EFFECT.items():
        setattr(cls, name, _named(method, cls, name, f"Without effect: {reason}."))
    for name, signature in _REFUSED.items():
        named = _named(signature, cls, name, "Not supported; ArgumentError.")
        setattr(cls, name, _refusing(named))
    return cls


def _named(method: Callable, cls: type, name: str, doc: str) -> Callable:
    method.__name__, method.__qualname__, method.__doc__ = name, f"{cls.__name__}.{name}", doc
    return method


def _refusing(signature: Callable) -> Callable:
    @wraps(signature)
    def refuse(*args, **kwargs):
        signature(*args, **kwargs)  # wrong arguments are a TypeError, as with any method
        raise ArgumentError(
            f"libddp fsdp: {signature.__name__} is not supported: libddp's own collectives move "
            "what is sharded. Hint: leave it out."
        )

    return refuse
