"""A collective writes over what a backward pass needs: autograd sees what it sees with Gloo."""

import checks
import libddp.distributed as ddp_dist
import torch
import torch.distributed as dist

SIZE = 2
#: Of all-to-all: not in torch 2.11.
GLOO_HAS_LISTS = torch.__version__ >= (2, 15)


def parts(tensor):
    return list(tensor.chunk(SIZE))


def ones():
    return torch.ones(2)


CALLS = {
    "all_gather": lambda api, x, group: api.all_gather(parts(x), ones(), group=group),
    "all_gather_into_tensor": lambda api, x, group: api.all_gather_into_tensor(
        x, ones(), group=group
    ),
    "reduce_scatter": lambda api, x, group: api.reduce_scatter(
        x, [torch.ones(4)] * SIZE, group=group
    ),
    "reduce_scatter_tensor": lambda api, x, group: api.reduce_scatter_tensor(
        x, torch.ones(8), group=group
    ),
    "all_to_all": lambda api, x, group: api.all_to_all(parts(x), [ones()] * SIZE, group=group),
    "gather": lambda api, x, group: api.gather(
        ones(), parts(x) if dist.get_rank() == 0 else None, group=group
    ),
    "all_to_all_single": lambda api, x, group: api.all_to_all_single(x, torch.ones(4), group=group),
    "all_reduce": lambda api, x, group: api.all_reduce(x, group=group),
    "all_reduce of averages": lambda api, x, group: api.all_reduce(
        x, api.ReduceOp.AVG, group=group
    ),
    "all_reduce_coalesced": lambda api, x, group: dist.all_reduce_coalesced([x], group=group),
    "reduce": lambda api, x, group: api.reduce(x, 0, group=group),
    "reduce of averages": lambda api, x, group: api.reduce(x, 0, api.ReduceOp.AVG, group=group),
    "broadcast": lambda api, x, group: api.broadcast(x, 0, group=group),
    "scatter": lambda api, x, group: api.scatter(
        x, [torch.ones(4)] * SIZE if dist.get_rank() == 0 else None, group=group
    ),
}


def is_noticed(name, api, group):
    """Whether the pass that needs what the call has written over is refused."""
    saved = torch.full((4,), 2.0)
    weight = torch.ones(4, requires_grad=True)
    product = (weight * saved).sum()
    CALLS[name](api, saved, group)
    try:
        product.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def check_as_with_gloo():
    gloo = dist.new_group(backend="gloo")
    for name in CALLS:
        if name == "all_to_all" and not GLOO_HAS_LISTS:
            continue
        wanted = is_noticed(name, dist, gloo)
        assert is_noticed(name, dist, None) == wanted, name
        assert is_noticed(name, ddp_dist, None) == wanted, name


def check_sparse_tensors():
    versions = []
    for api, group in ((dist, dist.new_group(backend="gloo")), (dist, None), (ddp_dist, None)):
        tensor = torch.eye(2).to_sparse()
        api.all_reduce(tensor, group=group)
        versions.append(tensor._version)
    assert len(set(versions)) == 1


def check_tensors_of_inference_mode_are_written():
    with torch.inference_mode():
        for api in (dist, ddp_dist):
            found = torch.empty(4)
            api.all_gather_into_tensor(found, ones())
            assert found.eq(1).all()


results, test_on_all_ranks = checks.suite(globals(), SIZE)
