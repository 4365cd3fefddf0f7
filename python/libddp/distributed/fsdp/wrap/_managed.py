"""The marks that torch puts on modules whose parameters it shards.

Transformers asks for them before it lets ranks generate, or drop layers, each by themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from libddp.distributed.fsdp.wrap._lookup import by_levels


def mark(modules: Iterable[torch.nn.Module], ignored: Container[torch.nn.Module] = ()) -> None:
    """These and what is under them, but for what is ignored or sharded by itself."""
    for root in modules:
        for _, module in by_levels(root, ignored):
            module._is_fsdp_managed_module = True
            module._fsdp_use_orig_params = True
