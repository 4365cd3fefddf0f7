"""Weights that are tied once they are sharded: on the meta device, as Transformers does, or not."""

import checks
import ddp_models
import fsdp_models as models
import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor


class Tied(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return logits, loss


def built():
    torch.manual_seed(4)
    return Tied()


def sharded(tie, bias=False):
    """On the meta device, where the weights are apart; then values, then tied."""
    fully_shard = models.libddp_fsdp().fully_shard
    with torch.device("meta"):
        model = Tied(bias)
        model.head.weight = nn.Parameter(torch.empty(13, 8))
    fully_shard(model.embedding)
    fully_shard(model.middle)
    fully_shard(model)
    model.to_empty(device="cpu")
    values = built().state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in values:
                of_rank = distribute_tensor(
                    values[name], parameter.device_mesh, parameter.placements
                )
                parameter.copy_(of_rank)
    tie(model)
    return model


def tie_the_head(model):
    model.head.weight = model.embedding.weight


def tie_the_embedding(model):
    model.embedding.weight = model.head.weight


def tie_other_objects(model):
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())
    model.head.weight = model.embedding.weight


def losses(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for step in range(3):
        with torch.no_grad():
            found.append(model(models.tokens(100))[1].item())
        for micro in range(2):
            loss = model(models.tokens(2 * step + micro))[1]
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def check_they_train_as_one():
    wanted = losses(ddp_models.wrap(built(), find_unused_parameters=False))
    for tie in (tie_the_head, tie_the_embedding, tie_other_objects):
        model = sharded(tie)
        found = losses(model)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), msg=tie.__name__)
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == 3
        state = model.state_dict()
        assert set(state) == set(built().state_dict())
        assert torch.equal(
            state["head.weight"].full_tensor(), state["embedding.weight"].full_tensor()
        )


def check_what_cannot_be_one_unit_is_refused():
    """The bias would stay in a unit that is not open where that of the weight is."""
    model = sharded(tie_the_head, bias=True)
    with pytest.raises(ValueError, match=r"'head.weight' of .* belongs to .* 'embedding' too"):
        model(models.tokens(0))


def check_models_with_values_from_the_start():
    """There each unit has the weight; they share the DTensor, whose gradients are added up."""
    fully_shard = models.libddp_fsdp().fully_shard
    wanted = losses(ddp_models.wrap(built(), find_unused_parameters=False))
    for tie in (tie_the_head, tie_the_embedding):
        model = built()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        fully_shard(model.embedding)
        fully_shard(model)
        tie(model)
        torch.testing.assert_close(torch.tensor(losses(model)), torch.tensor(wanted))


results, test_on_all_ranks = checks.suite(globals(), 1, 2)
