"""Parameters that a pass does not use, beside torch's FSDP1 and FSDP2."""

import checks
import ddp_models
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn


class Parts(nn.Module):
    """The loss may need one layer of two, and the parameters of a layer in part."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, parts):
        x = self.layers[0](x)
        if parts == "weights":
            return torch.nn.functional.linear(x, self.layers[1].weight).pow(2).sum()
        return (self.layers[1](x) if parts == "all" else x).pow(2).sum()


def torchs_fsdp1():
    return torch.distributed.fsdp.FullyShardedDataParallel(
        Parts(),
        process_group=ddp_models.gloo(),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def ours_fsdp1():
    return models.libddp_fsdp().FullyShardedDataParallel(Parts())


def torchs(**arguments):
    return models.theirs(Parts(), [], **arguments)


def ours(**arguments):
    return models.libddp_fsdp().fully_shard(Parts(), **arguments)


def trained(model, parts, clears=True):
    """The parameters' own values, with a momentum that goes on where the gradient is zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    seen = []
    for step in range(4):
        model(torch.randn(3, 6), "all" if step == 0 else parts).backward()
        optimizer.step()
        seen.append([p.grad is None for p in model.parameters()])
        optimizer.zero_grad(set_to_none=clears)
    return seen, [local(p).detach().clone() for p in model.parameters()]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(one, other):
    (seen, values), (wanted_seen, wanted) = one, other
    assert seen == wanted_seen
    assert all(map(torch.equal, values, wanted))


def check_fully_shard():
    for parts in ("first", "weights"):
        for clears in (True, False):
            same(trained(ours(), parts, clears), trained(torchs(), parts, clears))
            plain = trained(ours(use_dtensor=False), parts, clears)
            assert all(map(torch.equal, plain[1], trained(ours(), parts, clears)[1]))


def check_zeros_by_wish():
    model = ours()
    model.set_reduce_scatter_unused_params(True)
    seen, values = trained(model, "first")
    assert not any(map(any, seen))
    kept = trained(ours(), "first")[1]
    assert not all(map(torch.equal, values, kept))
    zeros = trained(models.libddp_fsdp().FullyShardedDataParallel(Parts()), "first")[1]
    assert all(map(torch.equal, values, zeros))


def check_fsdp1_has_zeros():
    """Of torch's values each rank has others: it cuts the flat array."""
    model = ours_fsdp1()
    theirs = torchs_fsdp1()
    trained(model, "first")
    trained(theirs, "first")
    with torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params(theirs):
        wanted = [p.detach().clone() for p in theirs.parameters()]
    found = list(model.state_dict().values())
    assert all(map(torch.equal, found, wanted))


def check_fsdp1_leaves_a_unit_alone_that_nobody_uses():
    """Its forward ran, but the loss needs nothing of it: weight decay must not touch it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x, with_head):
            y = self.body(x)
            z = self.head(y)
            return (z if with_head else y).sum()

    fsdp = torch.distributed.fsdp
    cpu = {"device_id": torch.device("cpu"), "use_orig_params": True}
    cpu["process_group"] = ddp_models.gloo()
    found = []
    for face, given in ((fsdp.FullyShardedDataParallel, cpu), (ours_class(), {})):
        net = Net()
        net.head = face(net.head, **given)
        model = face(net, **given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for with_head in (True, False, False):
            optimizer.zero_grad()
            model(torch.ones(2, 4), with_head).backward()
            optimizer.step()
            has_none = {p.grad is None for p in net.head.parameters() if p.numel()}
            found.append(has_none)
        with face.summon_full_params(model):
            found.append([p.tolist() for p in model.parameters()])
    of_torch, of_ours = found[:4], found[4:]
    assert of_ours[:3] == [{False}, {True}, {True}]
    assert of_ours[3] == of_torch[3]


def ours_class():
    return models.libddp_fsdp().FullyShardedDataParallel


def check_what_some_ranks_use():
    """torch needs its zeros by wish for that."""
    model = ours()
    model(torch.ones(2, 6), "all" if dist.get_rank() == 0 else "first").backward()
    plain = Parts()
    plain(torch.ones(2, 6), "all").backward()
    grad = model.layers[1].weight.grad.full_tensor()
    torch.testing.assert_close(grad, plain.layers[1].weight.grad / dist.get_world_size())


results, test_on_two_ranks = checks.suite(globals(), 2)
