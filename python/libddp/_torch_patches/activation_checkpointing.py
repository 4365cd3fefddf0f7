"""Makes torch's names for activation checkpointing libddp's.

Replaces `checkpoint`, `checkpoint_sequential` and `create_selective_checkpoint_contexts` of
torch.utils.checkpoint, and `CheckpointWrapper`, `checkpoint_wrapper` and
`apply_activation_checkpointing` of torch's wrapper module. torch has no way to register another
implementation. The drop-in asks for it; undone by uninstall.
"""

from __future__ import annotations

from types import ModuleType

from libddp._torch_patches.replacing import Replacements

_FUNCTIONS = "torch.utils.checkpoint"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def put(replacements: Replacements) -> None:
    """Once each module is imported."""
    replacements.put_after_import(_FUNCTIONS, lambda module: _put_functions(module, replacements))
    replacements.put_after_import(_WRAPPER, lambda module: _put_wrapper(module, replacements))


def _put_functions(theirs: ModuleType, replacements: Replacements) -> None:
    from libddp.utils import checkpoint as ours

    for name in (
        "checkpoint",
        "checkpoint_sequential",
        "create_selective_checkpoint_contexts",
    ):
        replacements.put(theirs, name, getattr(ours, name))


def _put_wrapper(theirs: ModuleType, replacements: Replacements) -> None:
    from libddp.distributed.algorithms._checkpoint import checkpoint_wrapper as ours

    for name in ("CheckpointWrapper", "checkpoint_wrapper", "apply_activation_checkpointing"):
        replacements.put(theirs, name, getattr(ours, name))
