"""The marks that torch puts on modules whose parameters it shards.

Transformers asks for them before it lets ranks generate, or drop layers, each by themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from libddp.distributed.fsdp.wrap._lookup import wrapped_module_of


def mark(modules: Iterable[torch.nn.Module], ignored: Container[torch.nn.Module] = ()) -> None:
    """These and what is under them, but for what is ignored or sharded by itself."""
    todo = list(modules)
    for module in todo:  # which grows
        module._is_fsdp_managed_module = True
        module._fsdp_use_orig_params = True
        todo += [
            child
            for child in module.children()
            if child not in ignored and wrapped_module_of(child) is None
        ]
