"""What may be passed as process_group: torch's groups, the C++ groups behind them, from_c10d's.

Whatever moves the bytes, two ranks' weights are those of the default group, bit for bit: a sum of
two numbers has one order.
"""

import warnings

import checks
import fsdp_models as models
import torch.distributed as dist
from in_place_group import InPlace
from states import assert_same
from torch.distributed.fsdp import ShardingStrategy

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def trained(process_group, strategy=ShardingStrategy.FULL_SHARD):
    """The model after three steps, and its whole weights."""
    model = models.wrap(models.build(), process_group=process_group, sharding_strategy=strategy)
    models.train(model, 3)
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def same(left, right):
    assert list(left) == list(right)
    assert_same(left, right)


def check_the_group_behind_the_default_group():
    from libddp.distributed import native

    for strategy in STRATEGIES:
        model, found = trained(native(), strategy)
        same(found, trained(None, strategy)[1])
        assert model.process_group is dist.group.WORLD


def check_another_librarys_group():
    from libddp.distributed import from_c10d

    part = dist.new_group(backend="gloo")
    wrapped = from_c10d(part)
    for strategy in STRATEGIES:
        expected = trained(None, strategy)[1]
        for group in (wrapped, part):
            model, found = trained(group, strategy)
            same(found, expected)
            assert model.process_group is part


def check_both_groups_of_a_hybrid_model():
    from libddp.distributed import from_c10d

    alone = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    replicate = from_c10d(alone[dist.get_rank()])
    shard = from_c10d(dist.new_group(backend="gloo"))
    same(trained((shard, replicate), ShardingStrategy.HYBRID_SHARD)[1], trained(None)[1])


def check_a_backend_object():
    """No torch group has it, so a mesh cannot either; everything without DTensors works."""
    from libddp.distributed import from_c10d

    store = dist.PrefixStore("raw", dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size())
    group = from_c10d(gloo)
    model, found = trained(group)
    same(found, trained(None)[1])
    model.clip_grad_norm_(1.0)
    del model
    group.shutdown()


def check_a_group_written_in_python():
    """As a backend object: nothing but its collectives is asked of it."""
    from libddp.distributed import from_c10d

    inner = InPlace(dist.group.WORLD)
    for strategy in STRATEGIES:
        model, found = trained(from_c10d(inner), strategy)
        same(found, trained(None, strategy)[1])
        assert model.process_group is inner


def check_a_mesh_of_another_librarys_group():
    from libddp.distributed import from_c10d

    part = dist.new_group(backend="gloo")
    from_c10d(part)
    mesh = dist.DeviceMesh.from_group(part, "cpu")
    expected = None
    for each in (mesh, None):
        model = models.shard(mesh=each)
        models.train(model, 3)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        same(whole, expected or whole)
        expected = whole


def check_another_librarys_group_as_it_is():
    """Said once, by its first rank."""

    def told(train):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train()
        texts = [str(each.message) for each in caught]
        text = "libddp: FSDP communicates over the backend 'gloo'"
        assert sum(text in each for each in texts) == (dist.get_rank() == 0), texts
        assert all("libddp" not in each.filename for each in caught if text in str(each.message))
        return found

    def shard():
        model = models.shard(mesh=dist.DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu"))
        models.train(model, 3)
        return {name: value.full_tensor() for name, value in model.state_dict().items()}

    expected = trained(None)[1]
    same(told(lambda: trained(dist.new_group(backend="gloo")))[1], expected)
    model = models.shard()
    models.train(model, 3)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    same(told(shard), whole)


results, test_on_all_ranks = checks.suite(globals(), 2)
