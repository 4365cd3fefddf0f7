"""What scripts do with sharded models, and the errors that they can cause."""

import functools
import time
import warnings
from types import SimpleNamespace

import checks
import ddp_models
import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn


def whole(model):
    """All parameters by name, as DDP's or a plain model has them."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_values(left, right, **tolerance):
    assert list(left) == list(right)
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def sgd(parameters):
    """Proportional to the gradients: AdamW makes large steps of rounding errors."""
    return torch.optim.SGD(parameters, lr=0.1)


def reference(steps, each_step=None, make_optimizer=models.adamw):
    model = ddp_models.wrap(models.build())
    models.train(model, steps, make_optimizer, each_step)
    return model.module.state_dict()


def check_parameters_keep_identity_and_dimensions():
    model = models.build()
    before = list(model.parameters())
    numel = sum(p.numel() for p in before)
    dims = [p.dim() for p in before]
    wrapped = models.wrap(model)
    after = list(wrapped.parameters())
    assert {id(p) for p in before} == {id(p) for p in after}
    assert dims == [p.dim() for p in before]
    mine = torch.tensor(sum(p.numel() for p in before))
    assert mine < numel * 0.6
    dist.all_reduce(mine)
    assert mine == numel
    plain = [name for name, _ in models.TinyGpt().named_parameters()]
    assert list(models.plain_names(wrapped.named_parameters())) == plain


def check_optimizer_from_before_wrapping_in_groups():
    model = models.build()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    wrapped = models.wrap(model)
    models.train(wrapped, 3, make_optimizer=lambda _: optimizer)
    replica = ddp_models.wrap(models.build())
    groups = [
        {"params": [p for p in replica.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in replica.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    models.train(replica, 3, make_optimizer=lambda _: torch.optim.AdamW(groups, lr=0.01))
    same_values(whole(wrapped), replica.module.state_dict(), rtol=0, atol=0)


def check_clipping_by_torchs_function_and_by_the_method():
    norms = []

    def by_method(model):
        norms.append(model.clip_grad_norm_(0.1))

    def by_function(model):
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    wanted = reference(4, by_function, sgd)
    for clip in (by_method, by_function):
        model = models.wrap()
        models.train(model, 4, sgd, clip)
        same_values(whole(model), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(norms[:4]), torch.stack(norms[4:8]))
    torch.testing.assert_close(torch.stack(norms[:4]), torch.stack(norms[8:]))


def accumulate(model, num_micro, no_sync):
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(num_micro):
            is_last = micro == num_micro - 1
            if is_last or not no_sync:
                model(models.tokens(10 * step + micro))[1].backward()
            else:
                with model.no_sync():
                    model(models.tokens(10 * step + micro))[1].backward()
        optimizer.step()


def check_gradient_accumulation():
    replica = ddp_models.wrap(models.build())
    accumulate(replica, 3, no_sync=True)
    for no_sync in (True, False):
        model = models.wrap()
        accumulate(model, 3, no_sync)
        same_values(whole(model), replica.module.state_dict(), rtol=1e-5, atol=1e-6)


def check_evaluation_between_steps():
    model = models.wrap()
    optimizer = models.adamw(model.parameters())
    plain = models.build()
    with torch.no_grad():
        torch.testing.assert_close(model(models.tokens(0))[0], plain(models.tokens(0))[0])
    for step in range(3):
        optimizer.zero_grad()
        model(models.tokens(step))[1].backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(models.tokens(99))
        model.train()
    same_values(whole(model), reference(3), rtol=0, atol=0)


def check_forward_without_backward():
    model = models.wrap()
    model(models.tokens(5))
    models.train(model, 2)
    same_values(whole(model), reference(2), rtol=0, atol=0)


def check_a_forward_that_raises():
    model = models.wrap()
    with pytest.raises(IndexError):
        model(torch.full((2, 6), 99))
    models.train(model, 2)
    same_values(whole(model), reference(2), rtol=0, atol=0)


def check_a_backward_that_raises():
    model = models.wrap()

    def explode(gradient):
        raise ValueError("no gradient today")

    logits, loss = model(models.tokens(5))
    logits.register_hook(explode)
    with pytest.raises(ValueError, match="no gradient today"):
        loss.backward()
    models.train(model, 2)
    same_values(whole(model), reference(2), rtol=0, atol=0)


def check_frozen_parameters():
    def build():
        model = models.build()
        model.embedding.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model

    replica = ddp_models.wrap(build())
    models.train(replica, 3)
    model = models.wrap(build())
    models.train(model, 3)
    same_values(whole(model), replica.module.state_dict(), rtol=0, atol=0)
    assert model.embedding.weight.grad is None


class Selective(nn.Module):
    """Uses one of its layers per forward, twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, which):
        return self.layers[which](torch.tanh(self.layers[which](x)))


def check_unused_units_and_a_module_called_twice():
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(3)
    plain = Selective()
    torch.manual_seed(3)
    model = models.wrap(Selective(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    x = torch.arange(8.0).view(2, 4)
    for which in (0, 2, 0):
        plain(x, which).sum().backward()
        model(x, which).sum().backward()
    assert model.layers[1].weight.grad is None
    with torch.no_grad():
        for p in (*plain.parameters(), *model.parameters()):
            if p.grad is not None:
                p -= 0.1 * p.grad
    same_values(whole(model), plain.state_dict())


def check_recomputation_inside_and_outside_of_units():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )
    from torch.utils.checkpoint import checkpoint

    wanted = reference(3)
    inside = models.wrap()
    apply_activation_checkpointing(inside, check_fn=lambda m: isinstance(m, models.Block))
    models.train(inside, 3)
    outside = models.wrap()
    for block in outside.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    models.train(outside, 3)
    for model in (inside, outside):
        found = {
            name.replace("_checkpoint_wrapped_module.", ""): v for name, v in whole(model).items()
        }
        same_values(found, wanted, rtol=0, atol=0)


def check_gradients_of_inputs():
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(3)
    plain = ddp_models.Mlp()
    torch.manual_seed(3)
    model = models.wrap(ddp_models.Mlp(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    x = torch.ones(2, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(found, wanted)
    assert all(p.grad is None for p in model.parameters())


def check_summoned_parameters():
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    model = models.wrap()
    shapes = {name: p.shape for name, p in models.TinyGpt().named_parameters()}
    with fsdp.summon_full_params(model):
        assert {name: p.shape for name, p in model.named_parameters()} == shapes
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
    wanted = {name: 2 * value for name, value in models.build().state_dict().items()}
    wanted["head.weight"] = wanted["embedding.weight"]
    same_values(whole(model), wanted)
    with fsdp.summon_full_params(model, writeback=False), torch.no_grad():
        model.norm.weight.zero_()
    same_values(whole(model), wanted)


def check_apply_initialises_whole_parameters():
    def zero_biases(module):
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert module.weight.shape[0] == module.out_features
            nn.init.constant_(module.bias, 0.5)

    model = models.wrap()
    model.apply(zero_biases)
    assert whole(model)["blocks.1.up.bias"].eq(0.5).all()


def check_full_state_dict_goes_round():
    model = models.wrap()
    models.train(model, 2)
    state = whole(model)
    assert list(state) == list(models.TinyGpt().state_dict())
    again = models.wrap(models.build(seed=5))
    again.load_state_dict(state)
    same_values(whole(again), state, rtol=0, atol=0)
    plain = models.TinyGpt()
    plain.load_state_dict(state)
    fully = models.shard(models.build(seed=6))
    fully.load_state_dict(plain.state_dict())
    found = {name: value.full_tensor() for name, value in fully.state_dict().items()}
    same_values(found, state, rtol=0, atol=0)


def check_optimizer_state_goes_round():
    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    replica = ddp_models.wrap(models.build())
    plain = models.adamw(replica.parameters())
    models.train(replica, 3, lambda _: plain)
    model = models.wrap()
    optimizer = models.adamw(model.parameters())
    models.train(model, 3, lambda _: optimizer)
    full = fsdp.optim_state_dict(model, optimizer)
    names = [name for name, _ in replica.module.named_parameters()]
    assert list(full["state"]) == names
    for name, wanted in zip(names, plain.state_dict()["state"].values(), strict=True):
        same_values(dict(sorted(full["state"][name].items())), dict(sorted(wanted.items())))
    # Another model goes on from there, as this one does.
    again = models.wrap(models.build(seed=5))
    again.load_state_dict(whole(model))
    other = models.adamw(again.parameters())
    other.load_state_dict(fsdp.optim_state_dict_to_load(again, other, full))
    models.train(model, 2, lambda _: optimizer, first=3)
    models.train(again, 2, lambda _: other, first=3)
    same_values(whole(again), whole(model), rtol=0, atol=0)
    full["state"]["extra"] = full["state"].pop("norm.bias")
    with pytest.raises(ValueError, match="'extra', which the optimizer has not"):
        fsdp.optim_state_dict_to_load(again, other, full)


def check_state_dict_for_rank_0_only():
    from torch.distributed.fsdp import FullStateDictConfig, StateDictType

    fsdp = models.libddp_fsdp().FullyShardedDataParallel
    model = models.wrap()
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        assert bool(model.state_dict()) == (dist.get_rank() == 0)
    assert model.state_dict()


def check_wrong_state_dicts():
    model = models.wrap()
    state = whole(model)
    del state["norm.bias"]
    state["extra"] = torch.ones(1)
    state["blocks.0.up.bias"] = torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    text = str(error.value).replace("_fsdp_wrapped_module.", "")
    for part in ("norm.bias", "extra", "blocks.0.up.bias"):
        assert part in text
    models.train(model, 1)


def check_deferred_initialisation():
    with torch.device("meta"):
        model = models.TinyGpt()

    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    model = models.wrap(model, param_init_fn=init)
    assert all(value.eq(0.25).all() for value in whole(model).values())
    with torch.device("meta"):
        linear = nn.Linear(4, 4)
    models.wrap(linear, auto_wrap_policy=None)(torch.ones(1, 4)).sum().backward()


def check_start_from_rank_0():
    torch.manual_seed(dist.get_rank())
    model = models.TinyGpt()
    model.register_buffer("mask", torch.full((1, 4), dist.get_rank()).expand(3, 4), False)
    model = models.wrap(model, sync_module_states=True)
    assert model.mask.eq(0).all()
    torch.manual_seed(0)
    same_values(whole(model), models.TinyGpt().state_dict(), rtol=0, atol=0)


def check_ignored_parameters():
    model = models.build()
    kept = model.norm.weight
    model = models.wrap(model, ignored_states=[kept])
    assert kept.shape == (12,)
    models.train(model, 1)
    assert model.norm.weight is kept
    assert kept.grad is not None


def check_retained_graph():
    model = models.wrap()
    replica = ddp_models.wrap(models.build(), find_unused_parameters=False)
    loss = model(models.tokens(0))[1]
    loss.backward(retain_graph=True)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], msg=name)
    del replica


def check_a_list_of_modules():
    ours, theirs = models.build(), models.build()
    parts = [ours.norm, *ours.blocks, ours.blocks[0].up]  # the last one is inside of another
    assert models.libddp_fsdp().fully_shard(parts) is parts
    models.libddp_fsdp().fully_shard(ours)
    models.theirs(theirs, parts=[[theirs.norm, *theirs.blocks]])
    assert models.train(ours, 3) == pytest.approx(models.train(theirs, 3), rel=1e-5)
    kind = models.libddp_fsdp().FSDPModule
    assert isinstance(ours.norm, kind)
    assert not isinstance(ours.blocks[0].up, kind)
    for wrong in ([], [3], [ours.norm, None]):
        with pytest.raises(ValueError, match="takes a module or a list of modules"):
            models.libddp_fsdp().fully_shard(wrong)


def check_methods_of_torch():
    import torch.distributed.fsdp as torchs

    fsdp, model = models.libddp_fsdp(), models.shard()
    model.set_unshard_in_backward(False)
    model.set_requires_all_reduce(False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    waited = []
    model.set_post_optim_event(SimpleNamespace(wait=lambda: waited.append(True)))
    assert waited, "gathers would not wait for an optimizer on another stream"
    model._set_unshard_async_op(True)
    fsdp.share_comm_ctx([model])
    model.set_gradient_divide_factor(2.0)
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(True)
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_reduce_scatter_unused_params(True)
    model.set_symm_mem_for_comm()
    model.reset_iter_state()
    assert models.train(model, 2) == models.train(models.shard(), 2)
    for refused in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(ValueError, match=f"{refused} is not supported"):
            getattr(model, refused)(print)
    assert _public(torchs.FSDPModule) <= set(dir(model))
    assert _public(torchs.FullyShardedDataParallel) <= set(dir(fsdp.FullyShardedDataParallel))


def _public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def check_mistakes():
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    fsdp = models.libddp_fsdp()
    model = models.wrap()
    with pytest.raises(ValueError, match="belongs to a sharded unit already"):
        fsdp.FullyShardedDataParallel(model.blocks[0]._fsdp_wrapped_module)
    with pytest.raises(ValueError, match="wrapped already"):
        models.wrap(model)
    sharded = models.shard()
    with pytest.raises(ValueError, match="wrapped already"):
        fsdp.fully_shard(sharded)
    with pytest.raises(ValueError, match="HYBRID_SHARD shards over one group"):
        models.wrap(process_group=dist.group.WORLD, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(ValueError, match="exclude each other"):
        models.wrap(ignored_modules=[], ignored_states=[])
    with pytest.raises(ValueError, match="is no policy"):
        models.wrap(auto_wrap_policy=3)
    with torch.device("meta"):
        holder = nn.ParameterList([torch.ones(3)])
    with pytest.raises(ValueError, match="no reset_parameters"):
        models.wrap(holder, auto_wrap_policy=None)
    with pytest.raises(ValueError, match="expected 42 to be callable"):
        models.wrap(holder, auto_wrap_policy=None, param_init_fn=42)
    assert MixedPrecision is fsdp.MixedPrecision


def check_policies_that_choose_nothing():
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

    for classes, text in ((set(), "for no class"), ({nn.Conv2d}, "for Conv2d")):
        by_function = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        for policy in (ModuleWrapPolicy(classes), by_function):
            with pytest.raises(ValueError, match=f"{text}, and TinyGpt has no such module"):
                models.wrap(auto_wrap_policy=policy)
    block = models.wrap(models.Block(12), auto_wrap_policy=ModuleWrapPolicy({models.Block}))
    assert block(torch.ones(1, 2, 12)).shape == (1, 2, 12)


def check_a_parameter_that_two_units_share():
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    text = r"parameter 'head\.weight' of TinyGpt belongs to the wrapped module 'embedding' too"
    with pytest.raises(ValueError, match=text):
        models.wrap(auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))
    model = models.build()
    models.libddp_fsdp().fully_shard(model.embedding)
    with pytest.raises(ValueError, match=text):
        models.libddp_fsdp().fully_shard(model)
    with pytest.raises(ValueError, match=r"'Linear'.*'weight' belongs to a sharded unit already"):
        models.libddp_fsdp().fully_shard(model.head)
    model = models.build()
    fsdp = models.libddp_fsdp()
    fsdp.fully_shard([model.embedding, model.head])  # as one unit
    for block in model.blocks:
        fsdp.fully_shard(block)
    model = fsdp.fully_shard(model)
    assert model.head.weight is model.embedding.weight
    assert models.train(model, 3) == models.train(models.shard(), 3)


def check_parameters_changed_after_wrapping():
    model = models.wrap()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 2
    doubled = models.build()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    same_values(whole(model), doubled.state_dict(), rtol=0, atol=0)
    tokens = models.tokens(0)
    for parameter in [p for p in model.parameters() if p.numel()][:1]:
        parameter.data = parameter.data.clone()
    assert torch.equal(model(tokens)[0], doubled(tokens)[0])
    model = models.wrap()
    parameter = next(p for p in model.parameters() if p.numel())
    parameter.data = parameter.data.half()
    with pytest.raises(RuntimeError, match=r"it is Half \[.*\], and was Float"):
        model(models.tokens(0))


def said(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in found if "libddp fsdp:" in str(w.message)]


def check_a_warning_where_only_the_root_is_wrapped():
    def run(layers, width, wrap, **arguments):
        model = models.build(lambda: models.TinyGpt(layers, width))
        wrap(model, **arguments)(models.tokens(0))

    one_unit = {"auto_wrap_policy": None}
    fully_shard = models.libddp_fsdp().fully_shard
    assert said(lambda: run(3, 12, models.wrap, **one_unit)) == []  # small
    assert said(lambda: run(2, 256, models.wrap)) == []
    assert said(lambda: run(1, 512, models.wrap, **one_unit)) == []  # one block
    found = said(lambda: run(2, 256, models.wrap, **one_unit))
    if dist.get_rank() == 0:
        assert len(found) == 1, found
        assert "only the whole model is wrapped" in found[0]
        assert "auto_wrap_policy=ModuleWrapPolicy({Block})" in found[0]
    else:
        assert found == []
    assert said(lambda: run(2, 256, fully_shard)) == []  # once


def check_the_warning_names_no_container():
    from libddp.distributed.fsdp.wrap._one_unit_warning import repeated_kind

    model = nn.Sequential(*(nn.ModuleList([nn.Linear(1024, 1024)]) for _ in range(2)))
    sizes = {id(p): p.numel() for p in model.parameters()}
    assert repeated_kind(model, sizes) is None


def check_a_warning_for_containers_without_forward():
    class Both(nn.ModuleList):
        def forward(self, x):
            return self[1](self[0](x))

    pair = [models.wrap(nn.Linear(4, 4), auto_wrap_policy=None) for _ in range(2)]
    for holder in (nn.ModuleList(pair), nn.ModuleDict({"first": pair[0], "second": pair[1]})):
        found = said(functools.partial(models.wrap, holder, auto_wrap_policy=None))
        assert len(found) == 1, found
        assert f"implement forward: {type(holder).__name__}. Hint" in found[0]
    assert said(lambda: models.wrap(Both(pair), auto_wrap_policy=None)) == []


def check_models_that_differ():
    layer = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(ValueError, match=r"unit 'Linear'.*'weight'.*\[5, 4\].*\[4, 4\]"):
        models.wrap(layer, auto_wrap_policy=None)


results, test_usage = checks.suite(globals(), 2)


def wrap_with_an_error_on_rank_1():
    """Rank 0 waits for rank 1, which has found a mistake of its own."""
    from libddp.distributed import get_rank, init_process_group

    init_process_group("libddp")

    def init(module):
        raise LookupError("no weights for this rank")

    with torch.device("meta" if get_rank() == 1 else "cpu"):
        model = models.TinyGpt()
    began = time.monotonic()
    try:
        models.wrap(model, param_init_fn=init)
    except Exception as error:
        return time.monotonic() - began, type(error).__name__, str(error)


def test_an_error_of_one_rank_in_wrapping_reaches_the_others():
    first, second = ranks.run(wrap_with_an_error_on_rank_1, 2)
    assert second[1] == "LookupError"
    assert first[1] == "PeerError", first
    assert "in wrapping: LookupError: no weights for this rank" in first[2]
    assert first[0] < 30  # the timeout is 30 minutes
