"""The state dict of a model with what this rank owns, whichever face has sharded it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

from libddp.distributed.fsdp.state._sharded_tensors import convert_all
from libddp.distributed.fsdp.state._state_methods import StateMethods


def sharded_state(
    model: torch.nn.Module, use_dtensor: bool = True, copies: bool = False
) -> dict[str, Any]:
    """The state dict with what this rank owns, whichever way the model is sharded.

    Args:
        use_dtensor: DTensors wherever the mesh is known; else as torch's FSDP1 has it.
        copies: of FullyShardedDataParallel's parameters, as torch has them; those of fully_shard
            are the model's own memory, in torch too.
    """
    from torch.distributed.checkpoint import state_dict as torchs

    config = ShardedStateDictConfig(_use_dtensor=use_dtensor)
    StateMethods.in_own_memory(config, not copies)
    kind = StateDictType.SHARDED_STATE_DICT
    with StateMethods.state_dict_type(model, kind, config):
        state = torchs._state_dict_fn(model, "state_dict")()  # past _patch_model_state_dict
    convert_all(state, model, "", config)
    return state
