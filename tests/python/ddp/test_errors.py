"""What DDP refuses, and what the other ranks hear of it; no rank ever hangs."""

import os

import checks
import ddp_models as models
import pytest
import ranks
import torch
from torch import nn

RANK = int(os.environ.get("RANK", 0))


def wrap(model, **arguments):
    from libddp.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, **arguments)


def expect(kind, match):
    """The class `kind` of libddp.errors, with a text that matches."""
    from libddp import errors

    return pytest.raises(getattr(errors, kind), match=match)


def check_a_module_without_gradients():
    with expect("ArgumentError", "is not needed when a module doesn't have any parameter"):
        wrap(models.Mlp(frozen=4))
    with pytest.raises(RuntimeError):
        wrap(nn.Identity())


def check_different_models():
    with expect("ArgumentError", r"rank 1 has parameter 'layers.0.weight' Float \[6, 6\]"):
        wrap(models.Mlp(width=5 + RANK))


def check_unused_on_one_rank_is_named_everywhere():
    model = wrap(models.Heads())
    loss = model(torch.ones(2, 4), 0).sum()
    if RANK == 0:
        loss = loss + model.module.heads[1](torch.ones(2, 4)).sum()
    with expect("StateError", "parameters got no gradient") as caught:
        loss.backward()
    text = str(caught.value)
    assert "'heads.1.weight' (rank 1)" in text
    assert "'heads.2.bias' (all ranks)" in text
    assert "heads.0" not in text
    assert "find_unused_parameters=True" in text


def check_training_goes_on_after_an_unused_parameter():
    model = wrap(models.Heads())
    with expect("StateError", "heads.2.weight"):
        model(torch.ones(2, 4), 0).sum().backward()
    model.zero_grad()
    sum(model(torch.ones(2, 4), head).sum() for head in range(3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def check_replaced_parameter():
    model = wrap(models.Mlp())
    model.module.layers[1].bias = nn.Parameter(torch.zeros(16))
    with expect("StateError", r"'layers.1.bias'.*replaced after wrapping"):
        model(torch.ones(1, 16)).sum().backward()


def check_sparse_gradients():
    embedding = nn.Embedding(5, 3)
    model = wrap(embedding)
    embedding.sparse = True  # after wrapping
    with expect("ArgumentError", "'weight'.*a sparse tensor.*when the model is wrapped"):
        model(torch.tensor([1, 2])).sum().backward()


def check_bad_arguments():
    with expect("ArgumentError", "mixed_precision is 'bf16'.*Hint: pass torch's _MixedPrecision"):
        wrap(models.Mlp(), mixed_precision="bf16")
    with pytest.raises(ValueError, match="single element"):
        wrap(models.Mlp(), device_ids=[0, 1])
    with expect("ArgumentError", "uninitialized parameters"):
        wrap(nn.LazyLinear(3))


def check_an_exception_of_the_user_before_anything_was_sent():
    model = wrap(models.Mlp())

    def explode(gradient):
        raise KeyError("mine")

    handle = model.module.layers[1].weight.register_hook(explode)
    with pytest.raises(KeyError):
        model(torch.ones(1, 16)).sum().backward()
    handle.remove()
    model(torch.ones(1, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def run_all():
    from libddp.distributed import init_process_group

    init_process_group("libddp")
    results = checks.run(globals())
    # Last, because it ends the group: rank 1 raises in forward, and its process ends.
    model = wrap(models.Mlp())
    if RANK == 1:
        raise ZeroDivisionError("in forward")
    with expect("PeerError", "rank 1") as caught:
        model(torch.ones(1, 16)).sum().backward()
    again = pytest.raises(RuntimeError, match="rank 1")
    with again:
        model(torch.ones(1, 16)).sum().backward()
    return results, caught.value.peer_rank, str(caught.value)


@pytest.fixture(scope="module")
def outcomes():
    return ranks.launch(run_all, 2, deadline=180)


@pytest.mark.parametrize("name", checks.names(globals()))
def test_is_refused(outcomes, name):
    assert not outcomes[0].failed, ranks.describe(outcomes[0])
    checks.verify([outcomes[0].value[0]], name)


def test_a_rank_that_raises_in_forward_is_named_by_the_others(outcomes):
    survivor, culprit = outcomes
    assert culprit.error == "ZeroDivisionError", ranks.describe(culprit)
    assert not survivor.failed, ranks.describe(survivor)
    _, peer_rank, text = survivor.value
    assert peer_rank == 1
    assert "all_reduce" in text
