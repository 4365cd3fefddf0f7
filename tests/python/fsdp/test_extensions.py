"""Tensor classes that say themselves what fully_shard gathers, beside torch's fully_shard."""

import checks
import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree


class Low(torch.Tensor):
    """Travels in bfloat16, padded to equal parts."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype
        )

    def __init__(self, data):
        self.inner = data

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1
        assert isinstance(module, nn.Linear)
        rows = -(-outer_size[0] // mesh.size())
        sent = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        sent[: len(self.inner)] = self.inner
        return (sent,), "anything"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "anything"
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0][: len(out)])
            return None
        whole = outputs[0].to(param_dtype)
        return whole, (outputs[0], whole)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        plain = pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*plain[0], **plain[1]))


def model(rows):
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(6, rows), nn.Tanh(), nn.Linear(rows, 4))
    for layer in (made[0], made[2]):
        layer.weight = nn.Parameter(Low(layer.weight.detach()))
    return made


def trained(sharded):
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(5):
        loss = sharded(torch.randn(3, 6)).pow(2).sum()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = [p.to_local() for p in sharded.parameters()]
    plain = [w.inner if isinstance(w, Low) else w.detach() for w in weights]
    return losses, [w.clone() for w in plain]


def check_training_equals_torchs():
    fsdp = models.libddp_fsdp()
    for rows in (8, 7):
        made = model(rows)
        ours = fsdp.fully_shard(made)
        assert isinstance(ours[0].weight.to_local(), Low)
        found = trained(ours)
        wanted = trained(models.theirs(model(rows), []))
        assert found[0] == wanted[0]
        assert all(map(torch.equal, found[1], wanted[1]))


def check_the_gathered_values_are_what_the_class_sent():
    ours = models.libddp_fsdp().fully_shard(model(8))
    seen = []
    ours[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    ours(torch.ones(2, 6))
    assert torch.equal(seen[0], model(8)[0].weight.inner.bfloat16().float())


def put_on_the_rows(sharded):
    """As a script does that has plain parameters."""

    def before(self, mesh):
        return (self.to(torch.bfloat16),), None

    def after(self, outputs, metadata, param_dtype, *, out=None):
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0])
            return None
        whole = outputs[0].to(param_dtype)
        return whole, (outputs[0], whole)

    for layer in (sharded[0], sharded[2]):
        rows = layer.weight._local_tensor
        rows.fsdp_pre_all_gather = before.__get__(rows)
        rows.fsdp_post_all_gather = after.__get__(rows)
    return sharded


def layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def check_attributes_of_the_rows():
    fsdp = models.libddp_fsdp()
    found = trained(put_on_the_rows(fsdp.fully_shard(layers())))
    wanted = trained(put_on_the_rows(models.theirs(layers(), [])))
    assert found[0] == wanted[0] != trained(fsdp.fully_shard(layers()))[0]
    assert all(map(torch.equal, found[1], wanted[1]))
    by_columns = fsdp.fully_shard(
        layers(), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.dim() - 1)
    )
    with pytest.raises(ValueError, match="has fsdp_pre_all_gather, and is cut on dim 1"):
        put_on_the_rows(by_columns)(torch.ones(2, 6))


def check_the_plain_form_refuses_them():
    with pytest.raises(ValueError, match="is of a tensor class that handles operations itself"):
        models.libddp_fsdp().fully_shard(model(8), use_dtensor=False)


results, test_on_two_ranks = checks.suite(globals(), 2)
