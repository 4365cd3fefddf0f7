"""torch's private names in the class of the drop-in: reducer, logging, groups, copies."""

import copy
import os
import pickle

import checks
import ddp_models as models
import drop_in
import pytest
import ranks
import torch
import torch.distributed as dist
from ddp_models import is_equal_on_all_ranks
from ddp_models import wrap_in_torchs_place as wrap
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

RANK = int(os.environ.get("RANK", 0))
#: Logging data that is the same as torch's.
SAME_KEYS = [
    "world_size",
    "rank",
    "module_name",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "dtypes",
    "device_ids",
    "output_device",
    "is_multi_device_module",
    "has_sync_bn",
    "broadcast_buffers",
    "find_unused_parameters",
    "bucket_cap_bytes",
    "master_addr",
]


def x(rank=None):
    generator = torch.Generator().manual_seed(20 + (RANK if rank is None else rank))
    return torch.randn(4, 16, generator=generator)


def check_logging_data():
    model = wrap(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), bucket_cap_mb=0.001)
    theirs = TorchDDP(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        process_group=models.gloo(),
        bucket_cap_mb=0.001,
    )
    assert (before := model._get_ddp_logging_data())["has_rebuilt_buckets"] == 0
    assert before["iteration"] == 0
    for ddp in (model, theirs):
        for _ in range(3):
            ddp(x()).sum().backward()
    data, torchs = model._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    for key in SAME_KEYS:
        assert data[key] == torchs[key], key
    assert data["backend_name"] == "libddp"
    assert data["iteration"] == 3
    sizes = [int(size) for size in data["bucket_sizes"].split(", ")]
    assert len(sizes) == data["num_buckets_reduced"]
    assert sum(sizes) == data["total_parameter_size_bytes"]
    model._set_ddp_runtime_logging_sample_rate(1)
    with pytest.raises(ValueError, match="equal or greater than 1"):
        model._set_ddp_runtime_logging_sample_rate(0)


def check_a_subclass_that_is_nothing_but_a_module():
    """As mmengine's MMSeparateDistributedDataParallel makes itself one."""
    kind = type(wrap(nn.Linear(1, 1)))

    def separate(kind, wrap_part):
        class Separate(kind):
            def __init__(self, module):
                super(kind, self).__init__()
                self.module = module
                for name, part in module.named_children():
                    setattr(module, name, wrap_part(part))

            def forward(self, value):
                return self.module(value)

        torch.manual_seed(3)
        return Separate(nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 1)))

    ours = separate(kind, wrap)
    theirs = separate(TorchDDP, lambda part: TorchDDP(part, process_group=models.gloo()))
    for model in (ours, theirs):
        model(x()).sum().backward()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    ours.double().requires_grad_(False)
    assert ours.module[0].module.weight.dtype == torch.float64
    with pytest.raises(TypeError, match="module"):
        kind()


def check_logging_data_of_rebuilt_buckets_hooks_and_join():
    class Backwards(models.Mlp):
        def forward(self, value):
            for layer in reversed(self.layers):
                value = layer(value)
            return value

    model = wrap(Backwards(), bucket_cap_mb=0.002)
    model.register_comm_hook(None, answer)
    with model.join():
        for _ in range(2):
            model(x()).sum().backward()
    data = model._get_ddp_logging_data()
    assert data["has_rebuilt_buckets"] == 1
    assert model._has_rebuilt_buckets
    assert "," in data["rebuilt_bucket_sizes"]
    assert data["comm_hook"] == "answer"
    assert data["join_uneven_inputs"] == 1


def check_logging_data_of_errors_and_built_in_hooks():
    model = wrap(models.Mlp())
    assert "has_error" not in model._get_ddp_logging_data()
    with pytest.raises(TypeError):
        model.register_comm_hook(None, 1)
    data = model._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert "Communication hook must be callable" in data["error"]
    kind = dist.BuiltinCommHookType.FP16_COMPRESS
    model._register_builtin_comm_hook(kind)
    assert model._get_ddp_logging_data()["comm_hook"] == str(kind)
    partial = wrap(models.Heads())
    with drop_in.installed(), pytest.raises(RuntimeError):
        partial(torch.ones(2, 4), 0).sum().backward()
    assert "got no gradient" in partial._get_ddp_logging_data()["error"]
    assert "got no gradient" not in model._get_ddp_logging_data()["error"]


def answer(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check_a_loop_that_decides_late_to_synchronise():
    """As Lightning's manual optimization and Accelerate's trigger_sync_in_backward."""
    model = wrap()
    model.require_backward_grad_sync = False
    loss = model(x()).sum()
    model.require_backward_grad_sync = True
    model.require_forward_param_sync = True
    assert model.reducer._rebuild_buckets() is False
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([loss])
    loss.backward()
    model.reducer._delay_all_reduce()
    assert is_equal_on_all_ranks(model.module.layers[0].weight.grad)


def check_removed_hooks_leave_gradients_local():
    model = wrap(models.ConvNet())
    images = torch.ones(2, 3, 4, 4) * (RANK + 1)
    model(images).pow(2).sum().backward()
    model._remove_autograd_hooks()
    model._remove_autograd_hooks()
    model.zero_grad()
    model(images).pow(2).sum().backward()
    assert not is_equal_on_all_ranks(model.module.out.weight.grad)
    model(images)
    assert model.will_sync_module_buffers()
    model._sync_buffers()
    assert is_equal_on_all_ranks(model.module.norm.running_mean)
    assert model._get_ddp_logging_data()["num_buckets_reduced"] == 1
    model._replica.forward_failed("an error", True)
    with pytest.raises(RuntimeError, match="hooks have been removed"):
        model.register_comm_hook(None, answer)


def check_the_range_that_profilers_show():
    model = wrap(nn.Linear(2, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(1, 2)).sum().backward()
    ranges = [e for e in profile.events() if e.name == "DistributedDataParallel.forward"]
    assert len(ranges) == 1


def check_small_names():
    model = wrap()
    assert model._distributed_rank == RANK
    assert model._find_common_rank(RANK, True) == 1
    assert model._find_common_rank(RANK, RANK == 0) == 0
    with pytest.raises(ValueError, match="false on every rank"):
        model._find_common_rank(RANK, False)
    assert model.train(False) is model
    assert not model.module.training
    assert not model.is_multi_device_module
    assert model.broadcast_bucket_size == 250 << 20
    model._set_ddp_sink_clone(False)
    model._set_sparse_metadata({"layers.0.weight": torch.ones(1)})
    args, kwargs = model.to_kwargs((x(),), {"a": x()}, 0)
    assert torch.equal(args[0][0], kwargs[0]["a"])
    model._assign_modules_buffers()
    assert model.modules_buffers == []


def check_libddps_own_class_has_none_of_them():
    own, torchs_too = models.libddp_ddp(), models.drop_in_ddp()
    added = {name for name in vars(torchs_too) if not name.startswith("__")}
    inherited = {"_abc_impl", "_after_forward", "_join_group", "_replicate", "join_hook"}
    inherited.add("register_comm_hook")
    private = added - inherited - {"_register_builtin_comm_hook"}
    assert len(private) > 20
    plain = models.wrap()
    assert not [name for name in private if hasattr(own, name) or hasattr(plain, name)]
    assert issubclass(torchs_too, own)
    assert isinstance(plain, torchs_too)
    assert not isinstance(plain.module, torchs_too)


def check_copies_after_all_this():
    net = models.ConvNet()
    model = wrap(net, forward_sync_buffers=True)
    _apply_optimizer_in_backward(torch.optim.SGD, [net.out.weight], {"lr": 0.1})
    images = torch.ones(2, 3, 4, 4) * (RANK + 1)
    model(images).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward_sync_buffers is True
        assert other.process_group is dist.group.WORLD
        other(images).sum().backward()
        assert is_equal_on_all_ranks(other.module.conv.weight.grad)
        assert all(
            p is q for p, q in zip(other._module_parameters, other.parameters(), strict=True)
        )
    local = wrap(process_group=dist.new_group([1, 0]))
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(local)


results, test_on_every_rank = checks.suite(globals(), 2)


def shrink():
    """Three ranks train, one leaves, two go on; the gradients of rank 0 and 1 at the end."""
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    torch.manual_seed(1)
    model = wrap()
    model.compress_gradients(torch.float16)
    model(x()).sum().backward()
    survivors = dist.new_group([0, 1])
    model._update_process_group(survivors)
    if RANK == 2:
        return model.process_group.size(), None
    model.zero_grad()
    model(x()).sum().backward()
    ours = model.module.layers[0].weight.grad.clone()
    parts = []
    for rank in range(2):
        model.module.zero_grad()
        with model.no_sync():
            model(x(rank)).sum().backward()
        parts.append(model.module.layers[0].weight.grad.clone())
    torch.testing.assert_close(ours, sum(parts) / 2, rtol=1e-2, atol=1e-3)
    return model.process_group.size(), ours


def test_a_group_may_shrink():
    (size, first), (_, second), (size_of_third, _) = ranks.run(shrink, 3)
    assert (size, size_of_third) == (2, 3)
    assert torch.equal(first, second)
