"""Arguments that have no effect here, and that torch refuses all the same where they are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from libddp.distributed.fsdp.wrap._lookup import wrapped_module_of
from libddp.errors import ArgumentError


def keeps_unsharded(reshard_after_forward: Any, num_ranks: int) -> bool:
    """What fully_shard's argument says; as with torch 1, a group of one rank, is False.

    Raises:
        ArgumentError: neither None, nor a bool, nor a number that divides that of the ranks.
    """
    value = reshard_after_forward
    if value is None or isinstance(value, bool):
        return value is False
    if not isinstance(value, int):
        raise ArgumentError(
            f"libddp fsdp: reshard_after_forward should be a bool or an int, not {value!r}. "
            "Hint: True, False or None."
        )
    if value < 1 or num_ranks % value:
        raise ArgumentError(
            f"libddp fsdp: reshard_after_forward={value} is no factor of {num_ranks}, how many "
            "ranks there are. Hint: True, False or None; a number counts as True here."
        )
    return value == 1


def check_bool(name: str, value: Any) -> None:
    """Raises: ArgumentError, it is no bool."""
    if not isinstance(value, bool):
        raise ArgumentError(
            f"libddp fsdp: {name} should be a bool, not {value!r}. Hint: True or False."
        )


def check_sharded(where: str, modules: Iterable[Any]) -> None:
    """Raises: ArgumentError, one of them is no sharded module."""
    for module in modules:
        if getattr(module, "__dict__", None) is None or wrapped_module_of(module) is None:
            raise ArgumentError(
                f"libddp fsdp: {where} expects modules that fully_shard was called with, not a "
                f"{type(module).__name__}. Hint: pass these, or leave the call out: it has no "
                "effect here."
            )


def check_count(name: str, value: Any) -> None:
    """Raises: TypeError, it is no int; ArgumentError, it is less than 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"libddp fsdp: {name} must be an int, not {value!r}. Hint: it has no effect here; "
            "leave the call out."
        )
    if value < 1:
        raise ArgumentError(
            f"libddp fsdp: {name} must be a positive int, not {value}. Hint: it has no effect "
            "here; leave the call out."
        )
