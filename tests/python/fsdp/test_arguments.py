"""Arguments without effect, or of another type, that torch's fully_shard and FSDP refuse."""

import checks
import fsdp_models as models
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

TORCH_HAS_OVERRIDES = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")


def fully_shard(**arguments):
    return models.libddp_fsdp().fully_shard(nn.Linear(4, 4), **arguments)


def check_reshard_after_forward():
    for value, told in (
        (3, "is no factor of 2"),
        (0, "is no factor of 2"),
        (-1, "is no factor of 2"),
        ("x", "should be a bool or an int"),
        (1.0, "should be a bool or an int"),
    ):
        with pytest.raises(ValueError, match=f"reshard_after_forward.*{told}.*Hint"):
            fully_shard(reshard_after_forward=value)
        with pytest.raises(ValueError, match=r"reshard_after_forward"):
            models.theirs_of(nn.Linear(4, 4), reshard_after_forward=value)
    for value in (None, True, False, 1, 2):
        fully_shard(reshard_after_forward=value)(torch.ones(2, 4)).sum().backward()


def check_methods_without_effect():
    fsdp, model, plain = models.libddp_fsdp(), fully_shard(), nn.Linear(4, 4)
    for value in (2, None, "x"):
        with pytest.raises(ValueError, match="should be a bool"):
            model.set_reshard_after_forward(value)
    for call in (
        model.set_modules_to_forward_prefetch,
        model.set_modules_to_backward_prefetch,
        fsdp.share_comm_ctx,
    ):
        for wrong in (plain, 3):
            with pytest.raises(ValueError, match=r"expects modules that fully_shard was called"):
                call([model, wrong])
        call([model])
        call([])
    with pytest.raises(ValueError, match="must be a positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    for value in (True, 1.0):
        with pytest.raises(TypeError, match="must be an int"):
            model.set_reduce_scatter_max_input_buffers(value)


def check_strategies_of_the_class():
    for value in ("x", "FULL_SHARD", 3):
        with pytest.raises(ValueError, match="is no ShardingStrategy"):
            models.wrap(sharding_strategy=value)


if TORCH_HAS_OVERRIDES:

    def check_overrides_without_a_dtype():
        policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda _: torch.bfloat16)
        with pytest.raises(ValueError, match="param_dtype_override_fn must return None"):
            fully_shard(mp_policy=policy)
        policy = MixedPrecisionPolicy(param_dtype_override_fn=lambda p: p.dtype)
        fully_shard(mp_policy=policy)(torch.ones(2, 4)).sum().backward()


def check_what_torchs_code_asks_of_the_state():
    model = models.shard()
    contexts = {id(unit._get_fsdp_state()._comm_ctx) for unit in (model, *model.blocks)}
    assert len(contexts) == 1 + len(model.blocks)  # no two share one
    state = model._get_fsdp_state()
    with pytest.raises(AttributeError, match=r"has no 'fsdp_params': .*FSDPMemTracker"):
        _ = state._fsdp_param_group.fsdp_params
    kept = state._fsdp_param_group.post_forward_mesh_info  # DINOv3 does this
    state._lazy_init()
    state._fsdp_param_group.post_forward_mesh_info = kept


results, test_on_two_ranks = checks.suite(globals(), 2)
