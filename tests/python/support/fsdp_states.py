"""Sharded models with their optimizers, and comparing what they hold in whole tensors."""

import fsdp_models as models
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

WHOLE = StateDictOptions(full_state_dict=True)
RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def narrow():
    """A width that ranks do not divide evenly."""
    return models.TinyGpt(layers=1, width=36)


def make(build, seed=17, steps=0):
    model = build(models.build(narrow, seed))
    optimizer = models.adamw(model.parameters())
    models.train(model, steps, lambda _: optimizer)
    return model, optimizer


def whole(model, optimizer):
    return get_state_dict(model, optimizer, options=WHOLE)


def flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield prefix + str(key), value


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        one, other = dict(flat(one)), dict(flat(other))
        assert one.keys() == other.keys()
        for key, value in other.items():
            same = torch.equal(one[key], value) if torch.is_tensor(value) else one[key] == value
            assert same, key
