"""What a wrapped module does when torch's recursive load_state_dict comes to it.

The call may begin at a plain module around it, which knows nothing of sharding: then the outermost
wrapped module shows whole parameters, or converts shards, before its part and ends that after it.
Names in results and messages are those from before the wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from libddp.distributed.fsdp.state import _collective_errors, _loading, _state_dict
from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._summon_full_params import summoned

#: Attribute of each wrapped module that is part of a call under way.
_CALL = "_libddp_load"


class Call:
    """One load_state_dict, as far as it concerns `owner` and what is wrapped under it."""

    def __init__(self, owner: torch.nn.Module, errors: list[str] | None) -> None:
        self.owner = owner
        #: torch's list of messages, which tells one call from another; None until it is known.
        self.errors = errors
        #: Ends what was shown.
        self.stack = ExitStack()

    def members(self) -> Iterator[torch.nn.Module]:
        return (m for m in self.owner.modules() if hasattr(m, "_state_dict_type"))

    def begin(self) -> None:
        for member in self.members():
            vars(member)[_CALL] = self

    def end(self) -> None:
        for member in self.members():
            if vars(member).get(_CALL) is self:
                del vars(member)[_CALL]
        self.stack.close()

    def is_of(self, errors: list[str]) -> bool:
        """Whether torch's call with this list is the one, not one after it that had raised."""
        if self.errors is None:
            self.errors = errors
        return self.errors is errors


def watch(module: torch.nn.Module) -> None:
    """To be called once for each wrapped module."""
    module._register_load_state_dict_pre_hook(_before, with_module=True)
    module.register_load_state_dict_post_hook(_after)


@contextmanager
def prepared(module: torch.nn.Module) -> Iterator[None]:
    """`module`'s own load_state_dict: it has done by itself what a plain module cannot."""
    call = Call(module, None)
    call.begin()
    try:
        yield
    finally:
        call.end()


def is_cut(module: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Whether `state` needs converting to what this rank owns."""
    kind = module._state_dict_type
    return _loading.has_shards(state) or _state_dict.is_sharded(kind)


def wants_shards(module: torch.nn.Module, state: dict[str, Any]) -> bool:
    """Whether parameters show what this rank owns while `state` is loaded."""
    return not _state_dict.is_full(module._state_dict_type) or _loading.has_shards(state)


def _before(module, state, prefix, metadata, strict, missing, unexpected, errors) -> None:
    _loading.refuse_assign(metadata.get("assign_to_params_buffers", False))
    call = vars(module).get(_CALL)
    if call is None or not call.is_of(errors):
        if call is not None:
            call.end()
        _begin(module, state, prefix, errors)
    _state_dict.with_prefix(state, prefix)


def _begin(module, state, prefix: str, errors: list[str]) -> None:
    own = {key: value for key, value in state.items() if key.startswith(prefix)}
    call = Call(module, errors)
    if is_cut(module, own):
        names = {key[len(prefix) :]: value for key, value in own.items()}

        def convert():
            return _loading.local_state(module, names)

        local = _collective_errors.together(module._wrapped.groups(), "load a state dict", convert)
        state.update({prefix + name: value for name, value in local.items()})
    elif not wants_shards(module, own):
        call.stack.enter_context(summoned(module._wrapped, keep=True))
    call.begin()


def _after(module, incompatible) -> None:
    call = vars(module).get(_CALL)
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [canonical(name) for name in names]
    if call is None:
        return
    if call.errors is not None:
        call.errors[:] = [canonical(text) for text in call.errors]
    if call.owner is module:
        call.end()
