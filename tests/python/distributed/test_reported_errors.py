"""What the other ranks learn when one raises in a training step, caught or not."""

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import ranks
import torch
from libddp.errors import PeerError
from libddp.nn.parallel import DistributedDataParallel
from torch.distributed import DistError

import libddp
from libddp import distributed as ddp_dist

#: The bound is 0.5 s on an idle machine.
SOON = 10.0


class FailsInBackward(torch.autograd.Function):
    """Of a loss: its backward runs before the model's outputs are reached."""

    @staticmethod
    def forward(ctx, x):
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no such loss")


class Picky(torch.nn.Module):
    """Raises in forward or backward when told to."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.fails_in = None

    def forward(self, x):
        if self.fails_in == "forward":
            raise ValueError("no such token")
        hidden = self.layers[0](x)
        if self.fails_in == "backward":
            hidden.register_hook(self.fail)
        return self.layers[1](hidden)

    def fail(self, grad):
        raise ValueError("no such gradient")


KINDS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")


def wrapped(kind, module):
    if kind == "DistributedDataParallel":
        return DistributedDataParallel(module)
    from libddp.distributed import fsdp

    return getattr(fsdp, kind)(module)


def train(model, fails_in=None):
    next(part for part in model.modules() if isinstance(part, Picky)).fails_in = fails_in
    output = model(torch.ones(2, 4))
    loss = FailsInBackward.apply(output) if fails_in == "loss" else output.sum()
    loss.backward()


def start(kind="DistributedDataParallel"):
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    model = wrapped(kind, Picky())
    train(model)
    return ddp_dist.get_rank(), model


def learn_of_an_error(fails_in, kind="DistributedDataParallel", with_drop_in=True):
    """Rank 1 catches its error and stays away; the others say what they learn, and when."""
    rank, model = start(kind)
    if with_drop_in:
        libddp.install()  # whose engine knows the model that is there
    if rank == 1:
        with pytest.raises(ValueError, match="no such"):
            train(model, fails_in)
        end = time.monotonic() + 60
        while not ddp_dist.native().has_failed():
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(PeerError):
            ddp_dist.barrier()
        return None
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        train(model)
    return str(caught.value), caught.value.peer_rank, time.monotonic() - began


@pytest.mark.parametrize(
    ("fails_in", "words"),
    [
        ("forward", ["in forward: ValueError: no such token (test_reported_errors.py:"]),
        ("backward", ["in backward: ValueError: no such gradient (test_reported_errors.py:"]),
        ("loss", ["in backward: ValueError: no such loss (test_reported_errors.py:"]),
    ],
)
def test_a_caught_error_of_one_rank_is_told_to_those_who_wait(fails_in, words):
    outcomes = ranks.launch(learn_of_an_error, 3, fails_in)
    assert not outcomes[1].failed, ranks.describe(outcomes[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.failed, ranks.describe(outcome)
        text, culprit, seconds = outcome.value
        assert all(word in text for word in [*words, "rank 1 (pid ", "all_reduce"]), text
        assert culprit == 1
        assert seconds < SOON


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_drop_in_what_breaks_off_a_pass_through_the_model_is_told(kind):
    first, second = ranks.launch(learn_of_an_error, 2, "backward", kind, False)
    assert not second.failed, ranks.describe(second)
    assert not first.failed, ranks.describe(first)
    text, culprit, seconds = first.value
    assert "in backward: ValueError: no such gradient (test_reported_errors.py:" in text
    assert "rank 1 (pid " in text
    assert culprit == 1
    assert seconds < SOON


class UncaughtError(BaseException):
    """No `except Exception` on its way catches it."""


class Fatal(Picky):
    def fail(self, grad):
        raise UncaughtError("no such gradient")


class FatalLoss(FailsInBackward):
    @staticmethod
    def backward(ctx, grad):
        raise UncaughtError("no such loss")


def end_in_backward(kind, fails_in):
    """Nobody catches rank 1's error."""
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    model = wrapped(kind, Fatal())
    model(torch.ones(2, 4)).sum().backward()
    if ddp_dist.get_rank() == 0:
        with pytest.raises(PeerError) as caught:
            model(torch.ones(2, 4)).sum().backward()
        return str(caught.value)
    if fails_in == "backward":
        next(m for m in model.modules() if isinstance(m, Fatal)).fails_in = "backward"
    output = model(torch.ones(2, 4))
    (FatalLoss.apply(output) if fails_in == "loss" else output.sum()).backward()


@pytest.mark.parametrize("fails_in", ["backward", "loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_drop_in_an_uncaught_error_in_backward_is_told(kind, fails_in):
    first, second = ranks.launch(end_in_backward, 2, kind, fails_in)
    assert not first.failed, ranks.describe(first)
    what = {"backward": "no such gradient", "loss": "no such loss"}[fails_in]
    assert f"UncaughtError: {what} (test_reported_errors.py:" in first.value
    assert "rank 1 (pid " in first.value
    assert second.failed
    assert f"UncaughtError: {what}" in second.output


def go_on_after_errors():
    rank, model = start()
    # All ranks raise, one of them is slow to go on.
    with pytest.raises(ValueError, match="no such token"):
        train(model, "forward")
    if rank == 1:
        time.sleep(0.6)
    train(model)
    # One skips a batch; the others wait for its next one.
    if rank == 1:
        with pytest.raises(ValueError, match="no such token"):
            train(model, "forward")
    train(model)
    # Where nothing is averaged nobody waits: no word to the others.
    if rank == 1:
        for context in (torch.no_grad, model.no_sync):
            with context(), pytest.raises(ValueError, match="no such token"):
                train(model, "forward")
        time.sleep(0.6)
    train(model)
    ddp_dist.destroy_process_group()
    return True


def test_a_script_that_catches_an_error_and_goes_on_is_waited_for():
    for outcome in ranks.launch(go_on_after_errors, 2):
        assert outcome.value is True, ranks.describe(outcome)


def poison_a_gradient():
    rank, model = start()
    if rank == 1:
        model.module.layers[1].weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(DistError) as caught:
        train(model)
    return str(caught.value), model.module.layers[0].weight.isfinite().all().item()


def test_a_gradient_that_is_no_number_is_named_on_all_ranks():
    outcomes = ranks.launch(poison_a_gradient, 2, env={"LIBDDP_NAN_CHECK": "raise"})
    for outcome in outcomes:
        assert not outcome.failed, ranks.describe(outcome)
        text, is_finite = outcome.value
        assert "parameter 'layers.1.weight' (bucket 0 (" in text, text
        assert "on rank 1 is NaN or infinite" in text
        assert is_finite


def leave_in_a_finally():
    ddp_dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    ddp_dist.barrier()
    if ddp_dist.get_rank() == 1:
        try:
            {}["weights"]
        finally:
            ddp_dist.destroy_process_group()
    with pytest.raises(PeerError) as caught:
        ddp_dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_an_error_on_its_way_through_destroy_is_named():
    outcomes = ranks.launch(leave_in_a_finally, 2)
    assert outcomes[1].failed
    assert not outcomes[0].failed, ranks.describe(outcomes[0])
    assert "because of an error: KeyError: 'weights' (test_reported_errors.py:" in outcomes[0].value


def test_errors_in_children_of_multiprocessing_reach_the_others(tmp_path):
    script = Path(__file__).parents[1] / "support" / "multiprocessing_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    for form in ("torch", "spawn", "fork"):
        learned = json.loads((tmp_path / form / "learned").read_text())
        assert "rank 1 (pid " in learned["text"], learned
        assert "ValueError: no such shard (multiprocessing_ranks.py:" in learned["text"], learned
        assert learned["at"] - float((tmp_path / form / "raised").read_text()) < SOON


def test_an_exit_says_what_it_follows():
    from libddp.distributed._exit import _behind_exit

    error = ValueError("no such token")

    def leave(code):
        try:
            raise error
        except ValueError:
            sys.exit(code)

    assert _behind_exit(None) is None
    assert _behind_exit(error) is error
    for code, expected in ((1, error), (0, None), (None, None)):
        with pytest.raises(SystemExit) as end:
            leave(code)
        assert _behind_exit(end.value) is expected
    assert _behind_exit(SystemExit(3)) is None


def test_descriptions_name_the_innermost_line_of_the_program():
    from libddp.distributed._exit import describe

    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    text = describe(caught.value)
    assert text.startswith("RuntimeError: ")
    assert f"({os.path.basename(__file__)}:" in text
    assert "\n" not in text
    for call in (lambda: json.loads("{"), lambda: importlib.import_module("no_such_module")):
        with pytest.raises((ValueError, ImportError)) as caught:
            call()
        assert f"({os.path.basename(__file__)}:" in describe(caught.value)
    assert describe(KeyError()) == "KeyError"
