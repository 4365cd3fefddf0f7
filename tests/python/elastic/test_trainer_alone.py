"""ElasticTrainer in one process: whatever the loop's shape, a step's gradient is the batch's."""

import contextlib
import copy
import pickle
from unittest.mock import MagicMock

import pytest
import torch
from libddp.elastic.trainer import ElasticTrainer, GradientState
from torch import nn

import libddp

BATCHES = torch.linspace(-1, 1, 8 * 2 * 3, dtype=torch.float64).view(8, 2, 3)
#: Several losses, and a term that does not come from the model's output.
LOSSES = {
    "one": lambda model, x: model(x).pow(2).mean().backward(),
    "two": lambda model, x: [model(x).mean().backward(), model(x).sin().mean().backward()],
    "decay": lambda model, x: (
        model(x).mean() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
    ).backward(),
}


def make_model():
    torch.manual_seed(2)
    return nn.Linear(3, 4).double()


def prepared(model=None, micro_batches=4, **options):
    model = make_model() if model is None else model
    trainer = ElasticTrainer(model, micro_batches=micro_batches, **options)
    return trainer, model, trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1))


def zero_after(trainer, model, optimizer, backward, fixed=True):
    for x in BATCHES:
        with trainer.step(fixed):
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()


def zero_before(trainer, model, optimizer, backward, fixed=True):
    for x in BATCHES:
        with trainer.step(fixed):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()


def zero_both(trainer, model, optimizer, backward, fixed=True):
    for x in BATCHES:
        with trainer.step(fixed):
            optimizer.zero_grad()
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()


def zero_outside(trainer, model, optimizer, backward, fixed=True):
    for x in BATCHES:
        optimizer.zero_grad()
        with trainer.step(fixed):
            backward(model, x)
            optimizer.step()


def one_step(trainer, fixed):
    with trainer.step(fixed):
        pass


LOOPS = [zero_after, zero_before, zero_both, zero_outside]


def large_batches(backward, size):
    """The model after steps over `size` batches at once, by torch alone."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for large in BATCHES.view(-1, size * 2, 3):
        backward(model, large)
        optimizer.step()
        optimizer.zero_grad()
    return model


def is_close(a, b):
    """To the order of additions in float64."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=1e-14) for p, q in pairs)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_accumulated_steps_are_those_of_large_batches(loop, losses, micro_batches):
    trainer, model, optimizer = prepared(micro_batches=micro_batches)
    loop(trainer, model, optimizer, LOSSES[losses])
    assert trainer.num_steps == 8 // micro_batches
    assert trainer.gradient_state.num_backward_steps == 8
    assert is_close(model, large_batches(LOSSES[losses], micro_batches))


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_from_before_the_loop_are_cleared_where_the_script_does_it(loop):
    trainer, model, optimizer = prepared()
    model(BATCHES[0]).sum().backward()
    if loop is zero_after:
        optimizer.zero_grad()
    loop(trainer, model, optimizer, LOSSES["one"])
    assert is_close(model, large_batches(LOSSES["one"], 4))


def test_gradients_from_before_the_loop_stay_where_the_script_keeps_them():
    """zero_grad comes first after the first micro-step, whose gradients it must not take."""
    trainer, model, optimizer = prepared()
    model(BATCHES[0]).sum().backward()
    before = model.bias.grad.clone()
    for x in BATCHES[:4]:
        with trainer.step(True):
            model(x).sum().backward()
            whole = model.bias.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(whole, before + 2)


def test_without_a_fixed_batch_each_micro_step_is_a_step():
    for loop in LOOPS:
        trainer, model, optimizer = prepared()
        loop(trainer, model, optimizer, LOSSES["one"], fixed=False)
        assert trainer.num_steps == 8
        assert is_close(model, large_batches(LOSSES["one"], 1))


def test_a_script_that_divides_by_itself():
    trainer, model, optimizer = prepared(average_gradients=False)

    def backward(model, x):
        (model(x).pow(2).mean() / trainer.gradient_accumulation_steps).backward()

    zero_after(trainer, model, optimizer, backward)
    assert is_close(model, large_batches(LOSSES["one"], 4))


def test_gradients_outside_of_steps_are_whole():
    trainer, model, optimizer = prepared()
    zero_after(trainer, model, optimizer, LOSSES["one"])
    model(BATCHES[0]).sum().backward()
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 2))


def test_parameters_that_train_only_later():
    trainer, model, _ = prepared()
    model.bias.requires_grad_(False)
    with trainer.step(True):
        model(BATCHES[0]).sum().backward()
    model.bias.requires_grad_(True)
    with trainer.step(True):
        model(BATCHES[0]).sum().backward()
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, 0.5))


def test_gradients_past_the_hooks_are_an_error():
    class Past(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    trainer, model, _ = prepared(Past(), micro_batches=2)
    one_step(trainer, True)
    model.weight.grad = torch.ones(2)
    with pytest.raises(libddp.StateError, match=r"gradients of 2 micro-steps were .* are a sum"):
        one_step(trainer, True)
    trainer, model, optimizer = prepared(Past(), micro_batches=1)
    with trainer.step(True):
        model.weight.grad = torch.ones(2)
        optimizer.step()
    assert trainer.num_steps == 1
    trainer, model, _ = prepared(Past(), micro_batches=2, average_gradients=False)
    for _ in range(2):
        with trainer.step(True):
            model.weight.grad = torch.ones(2)
    assert trainer.num_steps == 1


def test_the_scheduler_counts_steps_of_the_optimizer():
    trainer, model, optimizer = prepared()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    rates = []
    for x in BATCHES:
        with trainer.step(fix_total_batch_size=True):
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates += scheduler.get_last_lr()
    assert rates == [0.1] * 3 + [0.05] * 4 + [0.025]
    with trainer.step(fix_total_batch_size=True):
        model(x).sum().backward()
    scheduler.step()  # of an epoch, amid an accumulation
    assert scheduler.get_last_lr() == [0.0125]
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    scheduler.base_lrs = [1.0]
    assert scheduler.scheduler.base_lrs == [1.0]
    again = pickle.loads(pickle.dumps(scheduler))
    assert again.get_last_lr() == [0.0125]


def test_the_optimizer_is_the_scripts_one():
    trainer, model, optimizer = prepared()
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert trainer.prepare(optimizer).optimizer is inner
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == inner.state_dict()
    optimizer.load_state_dict(inner.state_dict())
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def closure():
        optimizer.zero_grad()
        loss = model(BATCHES[0]).sum()
        loss.backward()
        return loss

    with trainer.step():
        loss = optimizer.step(closure)
        scheduler.step()
    assert loss.requires_grad
    assert calls == [1]
    optimizer.zero_grad()
    assert model.bias.grad is None
    again = pickle.loads(pickle.dumps(copy.copy(prepared()[2])))
    assert again.param_groups[0]["lr"] == 0.1
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert len(inner.param_groups) == 2


def test_a_grad_scaler_steps_through_it():
    """Its scale goes to the optimizer that knows of it, fused ones too."""
    for fused in (False, True):
        trainer = ElasticTrainer(model := make_model().float())
        reference = copy.deepcopy(model)
        optimizer = trainer.prepare(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        x = BATCHES[0].float()
        with trainer.step():
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        reference(x).sum().backward()
        torch.optim.SGD(reference.parameters(), lr=0.1).step()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        assert all(torch.allclose(p, q) for p, q in pairs)


def test_a_micro_step_that_fails_does_not_count():
    trainer, model, optimizer = prepared()
    for index, x in enumerate(BATCHES):
        if index % 3 == 2:
            with pytest.raises(KeyError), trainer.step(True):
                raise KeyError
        with trainer.step(True):
            LOSSES["one"](model, x)
            optimizer.step()
            optimizer.zero_grad()
    assert trainer.num_steps == 2
    assert trainer.gradient_state.num_backward_steps == 8
    assert is_close(model, large_batches(LOSSES["one"], 4))


def test_waiting_gradients_are_not_averaged_over_ranks():
    model = make_model()
    entered = []

    @contextlib.contextmanager
    def no_sync():
        entered.append(trainer.gradient_state.num_backward_steps)
        yield

    model.no_sync = no_sync
    trainer, _, optimizer = prepared(model)
    zero_after(trainer, model, optimizer, LOSSES["one"])
    assert entered == [1, 2, 3, 5, 6, 7]


def test_a_batch_that_is_not_complete():
    trainer, model, optimizer = prepared()
    with trainer.step(True):
        LOSSES["one"](model, BATCHES[0])
        optimizer.step()
    with pytest.raises(libddp.ArgumentError, match=r"1 of 4 micro-steps are accumulated\. Hint"):
        one_step(trainer, False)
    optimizer = trainer.prepare(optimizer)  # the number of ranks has changed
    assert model.bias.grad is None
    zero_after(trainer, model, optimizer, LOSSES["one"])
    assert is_close(model, large_batches(LOSSES["one"], 4))


def test_mistakes():
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(libddp.ArgumentError, match=r"micro_batches is .* 1 or more"):
            ElasticTrainer(make_model(), micro_batches=wrong)
    with pytest.raises(libddp.ArgumentError, match=r"prepare\(\) was not called"):
        one_step(ElasticTrainer(make_model()), True)


def test_the_number_of_micro_batches_as_dlrovers_agent_says_it(monkeypatch):
    monkeypatch.setenv("WORKER_NUM", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert prepared(micro_batches=None)[0].gradient_accumulation_steps == 8
    assert prepared(micro_batches=2)[0].gradient_accumulation_steps == 2
    for unset in ("0", None):
        monkeypatch.setenv("WORKER_NUM", unset) if unset else monkeypatch.delenv("WORKER_NUM")
        assert prepared(micro_batches=None)[0].gradient_accumulation_steps == 1


def test_epochs_and_counters():
    loader = MagicMock()
    trainer = ElasticTrainer(make_model(), loader)
    with trainer.step():
        pass
    assert trainer.num_steps == 1
    with trainer.epoch(3):
        loader.sampler.set_epoch.assert_called_once_with(3)
        assert trainer.num_steps == 0
    with trainer.step():
        pass
    trainer.reset()
    assert trainer.num_steps == 0
    assert ElasticTrainer(make_model()).gradient_state == GradientState()


def test_anything_with_dlrovers_calls_will_do():
    trainer = ElasticTrainer(MagicMock())
    optimizer, scheduler = trainer.prepare(MagicMock(), MagicMock())
    with trainer.step():
        optimizer.zero_grad()
        optimizer.step()
        scheduler.step()
    optimizer.optimizer.step.assert_called_once_with()
    scheduler.scheduler.step.assert_called_once_with()
