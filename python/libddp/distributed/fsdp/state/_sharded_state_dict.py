"""The state dict of a model with what this rank owns, whichever face has sharded it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

from libddp.distributed.fsdp.state._sharded_tensors import convert_all
from libddp.distributed.fsdp.state._state_methods import StateMethods


def sharded_state(model: torch.nn.Module, use_dtensor: bool = True) -> dict[str, Any]:
    """The state dict with what this rank owns, whichever way the model is sharded.

    Args:
        use_dtensor: DTensors wherever the mesh is known; else as torch's FSDP1 has it.
    """
    config = ShardedStateDictConfig(_use_dtensor=use_dtensor)
    kind = StateDictType.SHARDED_STATE_DICT
    with StateMethods.state_dict_type(model, kind, config):
        state = model.state_dict()
    convert_all(state, model, "", config)
    return state
