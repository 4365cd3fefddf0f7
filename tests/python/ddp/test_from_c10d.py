"""The reducer over Gloo (from_c10d): what holds over libddp's own group holds there.

The checks of the files for parity, hooks and uneven inputs run again, with the default group on
torch's Gloo: the weights equal those of torch's DistributedDataParallel over Gloo, bit for bit.
"""

import sys
from pathlib import Path

import checks
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).parent))

import ddp_models as models
import test_comm_hooks
import test_join
import test_parity

FILES = (test_parity, test_comm_hooks, test_join)


def check_groups_as_arguments():
    """The wrapped group, the torch group that it is over, and a group of one rank."""
    from libddp.distributed import from_c10d, native

    part = dist.new_group(backend="gloo")
    wrapped = from_c10d(part)
    for group in (wrapped, part):
        model = models.wrap(process_group=group)
        assert model.process_group is part
        assert native(model.process_group) is wrapped
        model(torch.randn(3, 16)).sum().backward()
        assert models.is_equal_on_all_ranks(model.module.layers[0].weight.grad)
    alone = [dist.new_group([rank], backend="gloo") for rank in range(2)][dist.get_rank()]
    model = models.wrap(process_group=from_c10d(alone))
    model(torch.randn(3, 16)).sum().backward()


def check_a_backend_object():
    from libddp.distributed import from_c10d

    store = dist.PrefixStore("raw", dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size())
    group = from_c10d(gloo)
    model = models.wrap(process_group=group)
    model(torch.randn(3, 16)).sum().backward()
    assert models.is_equal_on_all_ranks(model.module.layers[0].weight.grad)
    del model
    group.shutdown()


def check_explain_and_compression():
    results = []
    for ddp_class in (models.libddp_ddp(), TorchDDP):
        torch.manual_seed(3)
        model = ddp_class(models.Mlp(), bucket_cap_mb=0.002)
        if ddp_class is TorchDDP:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            model.compress_gradients(torch.float16)
            assert not any(bucket.in_arena for bucket in model.explain().buckets)
        model(torch.arange(32.0).view(2, 16) + dist.get_rank()).mean().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def run_all():
    dist.init_process_group("gloo")
    from libddp.distributed import from_c10d

    group = from_c10d()
    assert group.backend_name() == "c10d:gloo"
    found = checks.run(globals())
    for module in FILES:
        for name, result in checks.run(vars(module)).items():
            found[f"{module.__name__} {name}"] = result
    dist.destroy_process_group()
    return found


results = checks.fixture(run_all, world_size=2)
NAMES = checks.names(globals()) + [
    f"{module.__name__} {name}" for module in FILES for name in checks.names(vars(module))
]


@pytest.mark.parametrize("name", NAMES)
def test_over_gloo(results, name):
    checks.verify(results, name)


def die_in_a_step():
    """Rank 1 ends; rank 0's backward says so."""
    import os

    from libddp.distributed import from_c10d
    from libddp.errors import PeerError

    dist.init_process_group("gloo")
    model = models.wrap(process_group=from_c10d())
    model(torch.randn(3, 16)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(PeerError, match=r"all_reduce .*bucket.*gloo.*Hint"):
        model(torch.randn(3, 16)).sum().backward()
    os._exit(0)  # Gloo's own end would wait for rank 1


def test_a_rank_that_ends_is_a_peer_error():
    outcomes = ranks.launch(die_in_a_step, 2)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], ranks.describe(outcomes[0])


def end_groups_whose_engine_still_frees_tensors():
    """Gloo's thread frees what it has broadcast, for which it needs the interpreter's lock."""
    from libddp.distributed import from_c10d

    dist.init_process_group("gloo")
    for _ in range(50):
        inner = dist.new_group([0, 1])
        group = from_c10d(inner)
        for _ in range(3):
            group.broadcast(torch.ones(4), 0)
        dist.destroy_process_group(inner)
        del inner, group
    dist.destroy_process_group()


def test_a_group_ends_without_the_interpreters_lock():
    ranks.run(end_groups_whose_engine_still_frees_tensors, 2, deadline=60.0)


def run_the_documents_example():
    text = (Path(__file__).parents[3] / "docs" / "ddp.md").read_text()
    code = text.split("## Over another library's group")[1].split("```python\n")[1].split("```")[0]
    names = {"net": models.Mlp(), "x": torch.randn(2, 16), "loss": torch.ones(1)}
    exec(code, names)
    weight = names["net"].layers[0].weight
    assert models.is_equal_on_all_ranks(weight.grad)
    dist.destroy_process_group()


def test_the_documents_example_runs():
    ranks.run(run_the_documents_example, 2)
