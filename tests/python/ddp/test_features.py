"""Behaviour of DistributedDataParallel on two ranks, beyond equal numbers."""

import contextlib
import copy
import dataclasses
import io
import os
import pickle

import checks
import ddp_models as models
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

RANK = int(os.environ.get("RANK", 0))


def wrap(model=None, **arguments):
    from libddp.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(models.Mlp() if model is None else model, **arguments)


def x(value=1.0):
    return torch.full((2, 16), value * (RANK + 1))


def equal_on_all_ranks(tensor):
    """The same answer on every rank, so that what follows is the same too."""
    import torch.distributed as dist

    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    is_equal = torch.tensor(int(torch.equal(first, tensor)))
    dist.all_reduce(is_equal, dist.ReduceOp.MIN)
    return bool(is_equal)


def all_equal(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return all([equal_on_all_ranks(grad) for grad in grads])


def check_attributes():
    net = models.Mlp()
    weight = net.layers[0].weight
    model = wrap(net, device_ids=[3])
    assert isinstance(model, nn.Module)
    assert model.module is net
    assert model.device == torch.device("cpu")
    assert model.device_ids is None
    assert model.require_backward_grad_sync is True
    assert model.require_forward_param_sync is True
    assert next(model.parameters()) is weight
    assert all(key.startswith("module.layers.") for key in model.state_dict())
    model.load_state_dict(model.state_dict())
    with pytest.raises(AttributeError):
        model.layers  # noqa: B018 - torch does not forward attributes either


def check_ranks_start_from_rank_0():
    torch.manual_seed(RANK)
    model = wrap(models.ConvNet())
    assert all(equal_on_all_ranks(t) for t in model.state_dict().values())


def check_no_sync_restores():
    model = wrap()
    with model.no_sync():
        assert model.require_backward_grad_sync is False
        model(x()).sum().backward()
    assert model.require_backward_grad_sync is True
    assert not all_equal(model)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    assert model.require_backward_grad_sync is True
    model(x()).sum().backward()
    assert all_equal(model)


def check_gradients_stay_in_one_place():
    model = wrap()
    parameter = model.module.layers[1].weight
    places = set()
    for step in range(6):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(x()).sum().backward()
        if step > 0:  # the first step learns the order
            places.add(parameter.grad.data_ptr())
    assert len(places) == 1
    assert parameter.grad.untyped_storage().nbytes() == parameter.nbytes
    parameter.grad.detach_()  # torch forbids that where gradients are views


def check_forward_without_gradients_does_nothing_together():
    model = wrap()
    model(x()).sum().backward()
    if RANK == 0:
        with torch.no_grad():
            for _ in range(3):
                model(x())
    model(x()).sum().backward()
    assert all_equal(model)


def check_a_forward_without_backward_does_no_harm():
    model = wrap()
    if RANK == 0:
        model(x())
    model(x()).sum().backward()
    assert all_equal(model)


def check_buffers_follow_rank_0():
    model = wrap(models.ConvNet())
    images = torch.randn(2, 3, 4, 4)
    for _ in range(3):
        model(images * (RANK + 1)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(images)
    assert equal_on_all_ranks(model.module.norm.running_mean)
    model.train()
    model(images * (RANK + 1)).sum().backward()
    assert not equal_on_all_ranks(model.module.norm.running_mean)
    off = wrap(models.ConvNet(), broadcast_buffers=False)
    for _ in range(2):
        off(images * (RANK + 1)).sum().backward()
    assert not equal_on_all_ranks(off.module.norm.running_mean)


def check_an_expanded_buffer_follows_rank_0():
    """torch's own raises: several elements are one in memory."""
    layer = nn.Linear(16, 1)
    layer.register_buffer("mask", torch.full((1, 4), RANK).expand(3, 4))
    model = wrap(layer)
    assert model.module.mask.eq(0).all()
    model.module.mask = torch.full((1, 4), RANK + 1).expand(3, 4)
    model(x()).sum().backward()
    assert model.module.mask.eq(1).all()


def check_reassigned_buffers():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, value):
            self.count = self.count + RANK + 1
            return self.layer(value)

    model = wrap(Counts())
    for _ in range(3):
        model(x()).sum().backward()
    assert model.module.count.item() == 2 + RANK + 1


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner = models.Mlp()
        self.make = make

    def forward(self, value):
        return self.make(self.inner(value))


def check_outputs_of_any_shape():
    shapes = [
        (lambda t: Output(t, {}), lambda o: o.logits),
        (lambda t: Output(None, {"deep": [t]}), lambda o: o.extra["deep"][0]),
        (lambda t: {"a": (1, "b", t)}, lambda o: o["a"][2]),
        (Opaque, lambda o: o.tensor),
    ]
    for make, tensor_of in shapes:
        model = wrap(Returning(make))
        for _ in range(2):
            tensor_of(model(x())).sum().backward()
        assert all_equal(model)


class Checkpointed(nn.Module):
    """Every layer is recomputed; `shared`: the same layer twice; `opaque`: output not found."""

    def __init__(self, reentrant, shared=False, opaque=False, width=16):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.block = nn.Linear(width, width)
        self.last = nn.Linear(width, 16)
        self.reentrant, self.shared, self.opaque = reentrant, shared, opaque

    def forward(self, value):
        h = self.first(value)
        for _ in range(2 if self.shared else 1):
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        h = checkpoint(self.last, h, use_reentrant=self.reentrant)
        return Opaque(h) if self.opaque else h


def check_activation_checkpointing():
    for reentrant in (True, False):
        for opaque in (True, False):
            model = wrap(Checkpointed(reentrant, opaque=opaque))
            for _ in range(3):
                output = model(x())
                (output.tensor if opaque else output).sum().backward()
                assert all_equal(model)


def check_shared_weights_under_reentrant_checkpointing():
    arguments = {"bucket_cap_mb": 1e-4}  # a bucket for each parameter
    model = wrap(Checkpointed(True, shared=True), static_graph=True, **arguments)
    plain = copy.deepcopy(model.module)
    for _ in range(3):
        model.zero_grad()
        model(x(0.1)).sum().backward()
        assert all_equal(model)
    for rank in range(2):
        plain(torch.full((2, 16), 0.1 * (rank + 1))).sum().backward()
    torch.testing.assert_close(model.module.block.weight.grad, plain.block.weight.grad / 2)

    from libddp.errors import StateError

    model = wrap(Checkpointed(True, shared=True), **arguments)
    loss = model(x()).sum()
    with pytest.raises(StateError, match=r"'block.* second gradient .*static_graph=True"):
        loss.backward()


def check_unused_parameters_stay_none():
    model = wrap(models.Heads(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 4), RANK).sum().backward()
        assert model.module.heads[2].weight.grad is None
        assert all_equal(model)
        assert model.module.heads[0].weight.grad is not None


def check_set_static_graph():
    model = wrap(models.Heads())
    model._set_static_graph()
    for _ in range(3):
        model(torch.ones(1, 4), 1).sum().backward()
        assert all_equal(model)
    assert model.module.heads[0].weight.grad is None


def check_hooks_of_the_user_still_run():
    model = wrap()
    seen = []
    parameter = model.module.layers[0].weight
    parameter.register_hook(lambda g: seen.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    model(x()).sum().backward()
    assert seen == ["hook", "post"]
    assert all_equal(model)


def check_compiled_module():
    model = wrap(torch.compile(models.Mlp(), backend="eager"))
    for _ in range(2):
        model(x()).sum().backward()
    assert all_equal(model)
    assert all(key.startswith("module._orig_mod.") for key in model.state_dict())


def check_gradient_penalty():
    """torch.autograd.grad on the way to the loss, as WGAN-GP has it."""
    model = wrap()
    plain = copy.deepcopy(model.module)

    def penalty_backward(net, value):
        value = value.requires_grad_(True)
        (slope,) = torch.autograd.grad(net(value).sum(), value, create_graph=True)
        slope.pow(2).sum().backward()

    for _ in range(3):
        model.zero_grad()
        penalty_backward(model, x(0.1))
        assert all_equal(model)
    for rank in range(2):
        penalty_backward(plain, torch.full((2, 16), 0.1 * (rank + 1)))
    expected = plain.layers[1].weight.grad / 2
    torch.testing.assert_close(model.module.layers[1].weight.grad, expected)


def check_copies():
    model = wrap()
    model(x()).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        other(x()).sum().backward()
        assert all_equal(other)
    torch.save(model.module.layers[0].weight.grad, saved := io.BytesIO())
    assert saved.tell() < 4096 + model.module.layers[0].weight.nbytes


def check_mixed_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = nn.Linear(16, 4).to(torch.bfloat16)

        def forward(self, value):
            return self.b(self.a(value).to(torch.bfloat16)).float()

    model = wrap(Mixed())
    model(x()).sum().backward()
    assert all_equal(model)
    assert model.module.b.weight.grad.dtype is torch.bfloat16


def check_ignored_names():
    net = models.Mlp(layers=2)
    models.drop_in_ddp()._set_params_and_buffers_to_ignore_for_model(net, ["layers.0.weight"])
    model = wrap(net)
    model(x()).sum().backward()
    assert not equal_on_all_ranks(net.layers[0].weight.grad)
    assert equal_on_all_ranks(net.layers[1].weight.grad)


def check_inf_reaches_all_ranks():
    model = wrap()
    (model(x()) * (float("inf") if RANK else 1.0)).sum().backward()
    assert not torch.isfinite(model.module.layers[3].weight.grad).all()


def check_process_groups():
    import libddp.distributed as ddist

    group = ddist.new_group([1, 0])
    model = wrap(process_group=group)
    model(x()).sum().backward()
    assert all_equal(model)


results, test_feature = checks.suite(globals(), 2)


def test_arguments_are_those_of_torch():
    import inspect

    from libddp.nn.parallel import DistributedDataParallel

    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    # Those of torch 2.15 stand at the end.
    assert list(ours)[: len(theirs)] == list(theirs)
    same = [name for name in theirs if ours[name].default == theirs[name].default]
    assert set(theirs) - set(same) <= {"gradient_as_bucket_view", "broadcast_buffers"}
