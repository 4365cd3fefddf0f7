"""torch's optimizers over fully_shard work on local tensors: torch's numbers, and when not so."""

import contextlib
import inspect
from importlib import import_module

import checks
import fsdp_models as models
import torch
from torch import optim
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

OPTIMIZERS = [
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.AdamW, {"fused": True}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 1.0}),
    (optim.NAdam, {"decoupled_weight_decay": True}),
    (optim.RAdam, {"foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "foreach": True}),
]
if torch.__version__ >= (2, 15):  # 2.11's DTensors have no operation for it
    OPTIMIZERS.append((optim.Rprop, {}))


@contextlib.contextmanager
def seen_in_the_loop_of(name):
    """The lists of parameters that torch's loop over them gets."""
    module, name = import_module(f"torch.optim.{name}"), f"_single_tensor_{name}"
    function, seen = getattr(module, name), []

    def recording(params, *args, **kwargs):
        seen.append(list(params))
        return function(params, *args, **kwargs)

    setattr(module, name, recording)
    try:
        yield seen
    finally:
        setattr(module, name, function)


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(models.tokens(step))[1].backward()
        optimizer.step()


def assert_same(mine, other, *what):
    assert type(mine) is type(other), what
    if isinstance(mine, DTensor):
        assert mine.placements == other.placements
        mine, other = mine.to_local(), other.to_local()
    assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other)), what


def check_every_optimizer_is_torchs():
    for kind, options in OPTIMIZERS:
        both = []
        for model in (models.shard(), models.theirs()):
            optimizer = kind(model.parameters(), **options)
            train(model, optimizer)
            both.append((model, optimizer))
        (ours, mine), (theirs, other) = both
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_same(p, q, kind, options)
            assert p._version >= 2, kind  # autograd may ask whether it has changed
            assert mine.state[p].keys() == other.state[q].keys()
            for key, value in mine.state[p].items():
                assert_same(value, other.state[q][key], kind, options, key)


def check_the_loop_is_over_local_tensors():
    model = models.shard()
    optimizer = optim.AdamW(model.parameters())
    with seen_in_the_loop_of("adam") as seen:
        train(model, optimizer, 1)
    (params,) = seen
    for local, parameter in zip(params, model.parameters(), strict=True):
        assert type(local) is torch.Tensor
        assert local.data_ptr() == parameter.to_local().data_ptr()
    with seen_in_the_loop_of("adam") as seen:
        theirs = models.theirs()
        train(theirs, optim.AdamW(theirs.parameters()), 1)
    assert all(isinstance(p, DTensor) for p in seen[0])


def check_what_a_mode_or_another_placement_sees():
    class Counting(TorchDispatchMode):
        dtensors = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.dtensors += any(issubclass(each, DTensor) for each in types)
            return function(*args, **(kwargs or {}))

    model = models.shard()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    with Counting() as counting:
        optimizer.step()
    assert counting.dtensors > 0
    with seen_in_the_loop_of("sgd") as seen:
        parameter = next(p for p in model.parameters() if p.grad is not None)
        optimizer.step()
        assert type(seen[-1][0]) is torch.Tensor
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        optimizer.step()
    assert isinstance(seen[-1][0], DTensor)


def check_a_compiled_step():
    both = models.shard(), models.theirs()
    for model in both:
        optimizer = optim.AdamW(model.parameters())
        optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(model, optimizer)
    for p, q in zip(*(model.parameters() for model in both), strict=True):
        assert_same(p, q)


def check_parameters_of_both_kinds():
    """One list with DTensors and with parameters that are not sharded."""
    model, alone = models.shard(), torch.nn.Linear(3, 3)
    optimizer = optim.AdamW([*model.parameters(), *alone.parameters()])
    alone(torch.ones(3)).sum().backward()
    twin = torch.nn.Linear(3, 3)
    twin.load_state_dict(alone.state_dict())
    twin(torch.ones(3)).sum().backward()
    with seen_in_the_loop_of("adam") as seen:
        model(models.tokens(0))[1].backward()
        optimizer.step()
    assert {type(p) for p in seen[0]} == {torch.Tensor, torch.nn.Parameter}
    optim.AdamW(twin.parameters()).step()
    assert torch.equal(alone.weight, twin.weight)


def check_the_first_momenta_are_dtensors():
    """Also of a fused SGD, for which torch's DTensors have no operation."""
    for options in ({}, {"foreach": True}, {"fused": True}):
        found = []
        for whole in (False, True):
            model = models.TinyGpt() if whole else models.shard()
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            found.append([optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
        for momentum, other, p in zip(*found, models.shard().parameters(), strict=True):
            assert momentum.placements == p.placements
            assert torch.equal(momentum.full_tensor(), other)


def check_what_is_in_a_parameter_may_be_exchanged():
    """By to_empty and to: torch refuses it for parameters with weak references."""
    package = models.libddp_fsdp()
    made = models.on_meta()
    package.fully_shard(made)
    made.to_empty(device="cpu")
    made.apply(models.reset)
    for model in (made, models.shard().to(torch.float64)):
        optimizer = optim.AdamW(model.parameters())
        with seen_in_the_loop_of("adam") as seen:
            train(model, optimizer, 1)
        assert not any(isinstance(p, DTensor) for p in seen[0])


def check_what_is_compiled_is_torchs():
    """Also where no parameter is sharded: the functions are replaced in the whole process."""
    models.shard()

    def compiled(foreach):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
        steps = CompileCounter()
        step = torch.compile(optimizer.step, backend=steps)
        for _ in range(3):
            model(torch.ones(2, 4)).pow(2).mean().backward()
            step()
            optimizer.zero_grad()
        return model.weight.detach(), steps.frame_count

    def torchs(name):
        return inspect.unwrap(getattr(import_module(f"torch.optim.{name}"), name))

    for foreach in (True, False):
        ours = compiled(foreach)
        adam = import_module("torch.optim.adam")
        replaced, adam.adam = adam.adam, torchs("adam")
        try:
            theirs = compiled(foreach)
        finally:
            adam.adam = replaced
        assert replaced is not torchs("adam")
        assert_same(ours[0], theirs[0], foreach)
        assert ours[1] == theirs[1], (ours[1], theirs[1])  # as many graphs


results, test_on_all_ranks = checks.suite(globals(), 2)
