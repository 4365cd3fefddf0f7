"""Parameters of classes of their own: those with ordinary memory are sharded, others refused."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map


class Wrapper(torch.Tensor):
    """Its values are in another tensor, as in those of quantisation libraries."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(value):
            return value.inner if isinstance(value, Wrapper) else value

        def wrapped(value):
            return Wrapper(value) if isinstance(value, torch.Tensor) else value

        out = function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        return tree_map(wrapped, out)


class Named(nn.Parameter):
    """A parameter that knows more, and computes as others do."""


class Watched(torch.Tensor):
    """__torch_function__ alone: the memory is its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def with_parameter(parameter):
    model = models.build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[1].weight = parameter(model[1].weight.detach())
    return model


def by_both_faces(model):
    fsdp = models.libddp_fsdp()
    return lambda: fsdp.fully_shard(model()), lambda: fsdp.FullyShardedDataParallel(model())


def check_wrappers_are_refused_by_name():
    for make in by_both_faces(lambda: with_parameter(lambda w: nn.Parameter(Wrapper(w)))):
        with pytest.raises(
            ValueError, match=r"parameter '1\.weight' is of a tensor class"
        ) as error:
            make()
        assert "Hint" in str(error.value)


def check_wrappers_on_one_rank_are_refused_by_all():
    def model():
        first = dist.get_rank() == 0
        return with_parameter(lambda w: nn.Parameter(Wrapper(w) if first else w))

    for make in by_both_faces(model):
        with pytest.raises(ValueError, match=r"'1\.weight' is of a tensor class"):
            make()


def check_dtensors_are_refused_by_name():
    from torch.distributed.tensor import distribute_tensor

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for make in by_both_faces(
        lambda: with_parameter(lambda w: nn.Parameter(distribute_tensor(w, mesh)))
    ):
        with pytest.raises(
            ValueError, match=r"parameter '1\.weight' is (of a tensor class|a DTensor on)"
        ):
            make()


def check_quantised_ones_are_refused_by_name():
    def quantised(weight):
        values = torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
        return nn.Parameter(values, requires_grad=False)

    for make in by_both_faces(lambda: with_parameter(quantised)):
        with pytest.raises(ValueError, match=r"parameter '1\.weight' is of a tensor class"):
            make()


def check_classes_with_ordinary_memory_are_sharded():
    plain = with_parameter(nn.Parameter)
    x = torch.ones(2, 8)
    plain(x).sum().backward()
    for kind in (Named, lambda w: nn.Parameter(w.as_subclass(Watched))):
        for make in by_both_faces(lambda kind=kind: with_parameter(kind)):
            model = make()
            y = model(x)
            torch.testing.assert_close(y.as_subclass(torch.Tensor), plain(x), rtol=0, atol=0)
            y.sum().backward()
            found = models.whole_gradients(model).values()
            for whole, wanted in zip(found, plain.parameters(), strict=True):
                whole = whole.as_subclass(torch.Tensor)
                torch.testing.assert_close(whole, wanted.grad, rtol=0, atol=0)


class Wrapping(torch.autograd.Function):
    """Hands a parameter a gradient whose values are not in its memory."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return Wrapper(gradient.contiguous())


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4))

    def forward(self, x):
        return (Wrapping.apply(self.weight) * x).sum()


def check_gradients_whose_values_are_elsewhere():
    """As with a plain parameter, but that `.grad` is an ordinary tensor."""
    model = models.libddp_fsdp().fully_shard(Odd())
    model(torch.full((6, 4), 3.0)).backward()
    torch.testing.assert_close(
        model.weight.grad.full_tensor(), torch.full((6, 4), 3.0), rtol=0, atol=0
    )


results, test_tensor_classes = checks.suite(globals(), 2)
