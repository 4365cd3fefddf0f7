"""Parameters that a forward returns (a logit bias, prototypes): as views of the whole tensors.

The objects show this rank's rows once the forward is over, and a loss would go on with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.utils import _apply_to_tensors


def handed_out(output: Any, modules: Iterable[torch.nn.Module]) -> Any:
    """The output of a forward of these modules, whose parameters are whole."""
    if type(output) is torch.Tensor or not _has_parameter(output):
        return output
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    return _apply_to_tensors(lambda t: t.view_as(t) if id(t) in own else t, output)


def _has_parameter(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, torch.nn.Parameter)
    if isinstance(value, Mapping):
        return any(_has_parameter(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_parameter(each) for each in value)
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return any(_has_parameter(getattr(value, field.name, None)) for field in fields)
    return False
