"""model.py: causality, shapes, what decays."""

import pytest
import torch
from mingpt_runs import mingpt

GPT, GPTConfig = mingpt.model.GPT, mingpt.model.GPTConfig
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=7, block_size=8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.mark.parametrize("training", [True, False])
def test_no_place_sees_a_later_one(model, training):
    model.train(training)
    tokens = torch.randint(7, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] + 1) % 7
    with torch.no_grad():
        one, other = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_shapes_and_the_first_loss(model):
    tokens = torch.randint(7, (4, 8))
    logits, loss = model(tokens, tokens)
    assert logits.shape == (4, 8, 7)
    assert loss.item() == pytest.approx(torch.tensor(7.0).log().item(), rel=0.1)
    logits, loss = model(tokens[:, :3])
    assert logits.shape == (4, 3, 7)
    assert loss is None


def test_every_parameter_is_in_one_group_and_matrices_decay(model):
    decayed, others = model.parameter_groups(0.1)
    both = [*decayed["params"], *others["params"]]
    assert sorted(map(id, both)) == sorted(map(id, model.parameters()))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} >= {
        "head.weight",
        "blocks.0.attention.in_proj_weight",
        "blocks.1.feed_forward.1.weight",
    }
    assert {"places", "characters.weight", "norm.weight"} <= {
        names[id(p)] for p in others["params"]
    }


def test_the_mask_is_a_buffer_outside_of_snapshots(model):
    assert [name for name, _ in model.named_buffers()] == ["blocks.0.future", "blocks.1.future"]
    assert not [name for name in model.state_dict() if "future" in name]
