"""State dicts between unshard() and reshard(): what a module has for parameters then is whole.

As with torch, taking a state dict or loading one ends unshard() of the units in it, by whichever
module around them the call begins.
"""

from __future__ import annotations

from typing import Any

from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule


def watch(wrapped: WrappedModule) -> None:
    """To be called once, of a unit whose parameters are DTensors between steps."""

    def let_go(*args: Any) -> None:
        wrapped.let_go()

    registries = {id(registry) for param in wrapped.params for registry, _ in param.places}
    for part in {part: None for module in wrapped.modules for part in module.modules()}:
        if id(part._parameters) in registries:
            part.register_state_dict_pre_hook(let_go)
            part._register_load_state_dict_pre_hook(let_go)
