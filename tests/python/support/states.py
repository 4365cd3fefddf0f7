"""Equality of nested states, such as those of models and optimizers."""

import torch


def assert_same(one, other) -> None:
    """Tensors bit for bit, dicts key by key, anything else by ==."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert one == other
