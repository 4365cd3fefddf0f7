"""Which parameters have sparse gradients, by torch's rule."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def sparse_parameters(
    module: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """Names in `named` of the weights of `Embedding` and `EmbeddingBag` with sparse=True.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
        >>> sparse_parameters(net, net.named_parameters())
        ['0.weight']
    """
    weights = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
    }
    return [name for name, parameter in named if id(parameter) in weights]
