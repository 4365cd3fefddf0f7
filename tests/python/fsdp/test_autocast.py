"""FSDP1 in one region of autocast: as torch's, whose weights its cache does not have."""

import checks
import fsdp_models as models
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP


def losses(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(wrap(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data, found = torch.randn(8, 4), []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(4):
            optimizer.zero_grad()
            # A unit that runs twice gets the sum of its gradients in its own dtype.
            loss = sum((model(x).float() - 1).square().mean() for x in (data, data.flip(1)))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        with type(model).summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        found.append(model(data).float().sum().item())
    return found


def check_several_steps():
    gloo = dist.new_group(backend="gloo")
    options = {"use_orig_params": True}
    theirs = losses(
        lambda m: TorchFSDP(m, process_group=gloo, device_id=torch.device("cpu"), **options)
    )
    ours = losses(lambda m: models.libddp_fsdp().FullyShardedDataParallel(m, **options))
    assert len(set(ours)) == len(ours)
    assert ours[-1] == 0
    assert ours == theirs


results, test_on_two_ranks = checks.suite(globals(), 2)
