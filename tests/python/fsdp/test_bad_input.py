"""Mistakes with sharded models: named on every rank, soon, and the group stays usable."""

import os
import re
import time
from itertools import product

import checks
import fsdp_models as models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

SOON = 10.0  # seconds; the groups' timeout is minutes


def two_layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def wrap_layers(module=None, **arguments):
    arguments.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Linear}))
    return models.wrap(module or two_layers(), **arguments)


def batch():
    return torch.arange(8.0).view(2, 4) / 7 + dist.get_rank()


def message_of(call, error=ValueError):
    """What `call` raises on this rank; quickly."""
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert time.monotonic() - begin < SOON
    return str(caught.value)


def group_is_usable():
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def whole_gradients(model):
    with type(model).summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters()]


class Writes(nn.Linear):
    """Writes into its weight as it computes, in one of the ways of modules that do."""

    def __init__(self, way):
        super().__init__(4, 2)
        self.way = way

    def forward(self, value):
        if not torch.is_grad_enabled():
            return super().forward(value)
        # As each rank's batch has it: of equal values the bytes could not tell.
        values = torch.full((2, 4), 1.0 + dist.get_rank())
        if self.way == "in place":
            with torch.no_grad():
                self.weight.copy_(values)
        elif self.way == "in data":
            self.weight.data.copy_(values)
        else:
            self.weight.data = values
        return super().forward(value)


def check_a_forward_that_writes_into_a_parameter():
    for wrap, way in product(models.faces(), ("in place", "in data", "other data")):
        model = wrap(nn.Sequential(Writes(way)))
        with torch.no_grad():
            model(batch())  # to see whether it runs: it writes when it trains
        message = message_of(lambda model=model: model(batch()))
        assert "the forward has written into parameter '0.weight'" in message
        group_is_usable()


def check_an_embedding_that_writes_into_its_weight():
    for wrap in models.faces():
        model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2))
        message = message_of(lambda wrap=wrap, model=model: wrap(model))
        assert "Embedding '0' has max_norm=1.0" in message
        group_is_usable()
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2))
    ignored = {model[0].weight}
    model = models.libddp_fsdp().fully_shard(model, ignored_params=ignored)
    model(torch.arange(9)).sum().backward()


def check_modules_that_cannot_be_sharded():
    for wrap in models.faces():
        for make, told in (
            (lambda: nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' is uninitialized"),
            (lambda: torch.jit.script(nn.Linear(4, 2)), "is a ScriptModule"),
            (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 2))), "'0' is a ScriptModule"),
        ):
            assert told in message_of(lambda wrap=wrap, make=make: wrap(make()))
            group_is_usable()


def check_backward_twice():
    wanted = wrap_layers()
    wanted(batch()).sum().backward()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = wrap_layers(sharding_strategy=strategy)
        loss = model(batch()).sum()
        loss.backward()
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        # As if the second one had not been.
        assert [p.shape for p in model.parameters()] == shapes
        for found, gradient in zip(whole_gradients(model), whole_gradients(wanted), strict=True):
            torch.testing.assert_close(found, gradient)
        model(batch()).sum().backward()
        for found, gradient in zip(whole_gradients(model), whole_gradients(wanted), strict=True):
            torch.testing.assert_close(found, 2 * gradient)


def check_backward_twice_with_a_retained_graph():
    plain = two_layers()
    for rank in range(2):
        (plain(torch.arange(8.0).view(2, 4) / 7 + rank).sum() / 2).backward()
    model = wrap_layers()
    loss = model(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for found, parameter in zip(whole_gradients(model), plain.parameters(), strict=True):
        torch.testing.assert_close(found, 2 * parameter.grad)


def check_parameters_on_different_devices():
    module = two_layers()
    module[2].weight = nn.Parameter(torch.empty(2, 6, device="meta"))
    fsdp = models.libddp_fsdp()
    text = message_of(lambda: fsdp.fully_shard(module))
    assert "unit 'Sequential': parameter '2.weight' is on device meta" in text
    group_is_usable()


def check_one_rank_with_a_parameter_elsewhere():
    module = two_layers()
    if dist.get_rank() == 1:
        module[2].weight = nn.Parameter(torch.empty(2, 6, device="meta"))
    fsdp = models.libddp_fsdp()
    text = message_of(lambda: fsdp.fully_shard(module))
    assert "unit 'Sequential'" in text
    assert "parameter '2.weight' is on device meta" in text
    assert dist.get_rank() == 1 or "rank 1: " in text
    group_is_usable()


def check_one_rank_in_a_hybrid_mesh():
    if dist.get_world_size() != 4:
        return
    mesh = dist.init_device_mesh("cpu", (2, 2))
    module = two_layers()
    if dist.get_rank() == 3:
        module[0].bias = nn.Parameter(torch.empty(6, device="meta"))
    fsdp = models.libddp_fsdp()
    text = message_of(lambda: fsdp.fully_shard(module, mesh=mesh))
    assert "parameter '0.bias' is on device meta" in text
    group_is_usable()


def check_one_rank_that_wraps_twice():
    module = two_layers()
    fsdp = models.libddp_fsdp()
    owner = models.wrap(module[0], auto_wrap_policy=None)
    if dist.get_rank() == 0:
        text = message_of(lambda: fsdp.fully_shard(nn.Sequential(nn.Linear(4, 6))))
    else:
        text = message_of(lambda: fsdp.fully_shard(nn.Sequential(owner.module)))
    assert "parameter '0.weight' belongs to a sharded unit already" in text
    assert "'weight' of unit 'Linear'" in text
    assert dist.get_rank() == 1 or "rank 1: " in text
    group_is_usable()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def check_a_parameter_shared_across_units():
    text = message_of(lambda: wrap_layers(Tied()))
    assert "unit 'second': parameter 'weight' belongs to a sharded unit already" in text
    assert "it is 'weight' of unit 'first'" in text
    assert "Hint: " in text
    group_is_usable()
    fine = models.wrap(Tied(), auto_wrap_policy=None)
    fine(batch()).sum().backward()


def check_a_parameter_that_is_replaced():
    model = wrap_layers()
    model(batch()).sum().backward()
    kept = model[2]._fsdp_wrapped_module.bias
    model[2]._fsdp_wrapped_module.bias = nn.Parameter(torch.zeros(2))
    text = message_of(lambda: model(batch()), RuntimeError)
    assert "unit '2': parameter 'bias' was replaced" in text
    model[2]._fsdp_wrapped_module.bias = kept
    model(batch()).sum().backward()


def check_the_inside_of_torchs_class():
    model = wrap_layers()
    for name in ("_handle", "_all_handles", "_flat_param", "_is_root"):
        assert "parameters() are this rank's rows" in message_of(
            lambda name=name: getattr(model, name), AttributeError
        )
        assert not hasattr(model, name)
    model.module._handle = "its own"
    assert model._handle == "its own"


def check_a_parameter_that_is_resized():
    model = wrap_layers()
    parameter = model[0]._fsdp_wrapped_module.weight
    before = parameter.data
    parameter.data = torch.ones(9, 4)
    text = message_of(lambda: model(batch()), RuntimeError)
    assert "unit '0': parameter 'weight' is not what this rank owns of it any more" in text
    assert "[9, 4]" in text
    parameter.data = before
    model(batch()).sum().backward()
    group_is_usable()


def uses_of_parameters(model):
    """Whatever reads or writes the values of all parameters, but for training."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    fsdp = type(model)

    def summon(**arguments):
        with fsdp.summon_full_params(model, **arguments):
            pass

    def state_dict():
        with fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()

    yield summon
    yield lambda: summon(writeback=False)
    yield model.state_dict
    yield lambda: model.load_state_dict(two_layers().state_dict())
    yield state_dict
    yield lambda: get_model_state_dict(model)
    yield lambda: models.libddp_fsdp().save_snapshot(checks.shared_folder(), model)


def check_states_of_parameters_that_are_not_ours():
    for is_object in (True, False):
        for place in ({}, {"device_mesh": dist.init_device_mesh("cpu", (dist.get_world_size(),))}):
            model = wrap_layers(**place)
            model(batch()).sum().backward()
            layer = model[0]._fsdp_wrapped_module
            rows, columns = layer.weight.shape
            if is_object:
                layer.weight = nn.Parameter(torch.ones(rows, columns))
                wanted = "unit '0': parameter 'weight' was replaced"
            else:
                layer.weight.data = torch.ones(rows + 1, columns)
                wanted = "'(0\\.)?weight' (is not what this rank owns|has the shape)"
            for use in uses_of_parameters(model):
                text = message_of(use, RuntimeError)
                assert re.search(wanted, text), text
            group_is_usable()


def check_a_value_that_is_put_elsewhere_between_forward_and_backward():
    model = wrap_layers(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    loss = model(batch()).sum()
    weight = model[0]._fsdp_wrapped_module.weight
    weight.data = weight.detach().clone()
    text = message_of(loss.backward, RuntimeError)
    assert "put into other memory between a forward and its backward pass" in text


def check_errors_of_a_gradients_hook_keep_their_class():
    from libddp.errors import StateError

    class Opaque:
        def __init__(self, value):
            self.value = value

    class Hiding(nn.Linear):
        def forward(self, x):
            return Opaque(super().forward(x))

    model = wrap_layers(Hiding(4, 2), auto_wrap_policy=None)
    output = model(batch()).value
    text = message_of(lambda: output.sum().backward(), StateError)
    assert "got a gradient in a backward pass that reached none of the tensors" in text


def check_ranks_that_hybrid_sharding_does_not_divide():
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    try:
        text = message_of(lambda: models.wrap(sharding_strategy=ShardingStrategy.HYBRID_SHARD))
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
    assert f"LOCAL_WORLD_SIZE='3' does not divide the {dist.get_world_size()} ranks" in text
    assert "Hint: " in text


def check_a_gpu_that_is_not_there():
    for device in (0, "cuda", torch.device("cuda", 1)):
        text = message_of(lambda device=device: models.wrap(device_id=device))
        assert "device_id=" in text
        assert "on the CPU only" in text
    models.wrap(device_id=torch.device("cpu"))


def run_all():
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    results = checks.run(globals())
    destroy_process_group()
    return results


def fail_alone_while_wrapping():
    """Only rank 1 meets an error in Python, before its module becomes a unit."""
    from libddp.distributed import destroy_process_group, init_process_group

    init_process_group("libddp")
    ignored = [3] if dist.get_rank() == 1 else None
    begin = time.monotonic()
    try:
        wrap_layers(ignored_states=ignored)
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    time.sleep(1.5)  # the others are told while this rank is busy elsewhere
    destroy_process_group()
    return text, seconds


two = checks.fixture(run_all, world_size=2)
four = checks.fixture(run_all, world_size=4)


@pytest.mark.parametrize("name", checks.names(globals()))
def test_two_ranks(two, name):
    checks.verify(two, name)


def test_four_ranks(four):
    for name in ("one_rank_in_a_hybrid_mesh", "one_rank_with_a_parameter_elsewhere"):
        checks.verify(four, name)


def test_an_error_of_one_rank_reaches_the_others():
    (others, seconds), (own, _) = ranks.run(fail_alone_while_wrapping, 2)
    assert own.startswith("ArgumentError: libddp fsdp: cannot ignore a int")
    assert others.startswith("PeerError: ")
    assert "rank 1" in others
    assert "in wrapping: ArgumentError: libddp fsdp: cannot ignore a int" in others
    assert seconds < SOON
