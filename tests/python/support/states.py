"""Equality of nested states, such as those of models and optimizers."""

import torch


def assert_same(one, other) -> None:
    """Tensors bit for bit, dicts key by key, lists part by part, anything else by ==."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), f"a tensor and {other!r}"
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_same(mine, yours)
    else:
        assert one == other
