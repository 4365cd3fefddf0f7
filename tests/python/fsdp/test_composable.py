"""fully_shard beside torch's `replicate` in one model: each leaves alone what the other has.

At two ranks both average exactly, so all combinations train as DistributedDataParallel does.
"""

import checks
import pytest
import torch
import torch.distributed as dist
from torch import nn

#: The parts of the model, of which the function is called on, in this order; "" = the whole.
PARTS = ("0", "1", "")


def built():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 2))


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        x = torch.full((2, 4), float(dist.get_rank() + step + 1))
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def replicating():
    """torch's functions of that name, by kind."""
    from torch.distributed._composable import replicate

    found = {"ddp": replicate}
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp
    except ImportError:  # an older torch
        return found
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return found | {"fsdp": lambda module: by_fsdp(module, mesh=mesh)}


def check_each_way_round():
    from libddp.distributed.fsdp import fully_shard

    wanted = trained(nn.parallel.DistributedDataParallel(built()))
    for kind, replicate in replicating().items():
        for functions in (
            {"1": fully_shard, "": replicate},
            {"1": replicate, "": fully_shard},
            {"0": replicate, "1": fully_shard, "": replicate},
            {"0": fully_shard, "1": replicate, "": fully_shard},
        ):
            model = built()
            for name in PARTS:
                functions.get(name, lambda module: module)(model.get_submodule(name))
            assert trained(model) == wanted, (kind, list(functions))


def check_both_on_one_module():
    from libddp.distributed.fsdp import fully_shard

    for replicate in replicating().values():
        model = built()
        replicate(model)
        with pytest.raises(ValueError, match="already managed by `replicate`"):
            fully_shard(model)
        model = built()
        fully_shard(model)
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(model)


def check_what_torch_has_sharded_itself():
    """Functions that take modules hand it to torch's."""
    import libddp.distributed.fsdp as package
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard as torchs

    class Net(nn.Linear):
        def features(self, x):
            return self(x) + nn.functional.linear(x, self.weight)

    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    theirs = torchs(Net(4, 4), mesh=DeviceMesh.from_group(gloo, "cpu"))
    torch.manual_seed(0)
    ours = package.fully_shard(Net(4, 4))
    for model in (theirs, ours):
        package.register_fsdp_forward_method(model, "features")
    x = torch.ones(2, 4)
    assert torch.equal(ours.features(x), theirs.features(x))
    package.share_comm_ctx([ours, theirs])
    assert package.fully_shard.state(ours) is not None
    assert package.fully_shard.state(nn.Linear(2, 2)) is None


results, test_on_all_ranks = checks.suite(globals(), 2)
