"""Modules and parameters that cannot be sharded: errors before anything has changed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parameter import is_lazy

from libddp.distributed.fsdp.wrap._names import canonical
from libddp.distributed.fsdp.wrap._sharding import Sharding
from libddp.errors import ArgumentError


def check(modules: list[torch.nn.Module], parameters: list) -> None:
    """
    Args:
        modules: of one unit.
        parameters: (name, parameter) pairs of the unit.

    Raises:
        ArgumentError: names what it is.
    """
    own = {id(parameter) for _, parameter in parameters}
    for name, part in _parts_of(modules):
        if isinstance(part, torch.jit.ScriptModule) and (
            part in modules or any(id(p) in own for p in part.parameters(recurse=False))
        ):
            named = repr(name) if name else "the module"
            raise ArgumentError(
                f"libddp fsdp: {named} is a ScriptModule (torch.jit), whose parameters cannot be "
                "replaced. Hint: shard the Python module, and use torch.compile."
            )
    for name, parameter in parameters:
        if is_lazy(parameter):
            raise ArgumentError(
                f"libddp fsdp: parameter {name!r} is uninitialized: a lazy module learns its shape "
                "in the first forward. Hint: run a dummy forward pass first."
            )
        if parameter.dim() == 0:
            raise ArgumentError(
                f"libddp fsdp: parameter {name!r} is a scalar, which cannot be cut into rows. "
                f"Hint: Change {name} to a 1D tensor with numel equal to 1, or leave it out "
                "(ignored_params, ignored_states)."
            )
    check_gradient_dtypes(parameters)


def check_gradient_dtypes(parameters: list) -> None:
    """The same of what a script may have set after wrapping, before the first forward."""
    for name, parameter in parameters:
        if not getattr(parameter, "_has_grad_dtype_override", False):  # torch 2.15
            continue
        if parameter.grad_dtype == parameter.dtype:
            continue
        raise ArgumentError(
            f"libddp fsdp: parameter {name!r} of {parameter.dtype} has "
            f"grad_dtype={parameter.grad_dtype}: averaged gradients have the parameter's dtype "
            "here. Hint: leave grad_dtype out; MixedPrecisionPolicy(reduce_dtype=...) says what "
            "gradients are averaged and accumulated in."
        )


def check_writes(modules: list[torch.nn.Module], parameters: list, sharding: Sharding) -> None:
    """The same of embeddings with max_norm where a forward may not write into parameters.

    Each rank would write into the weight for its own batch (FlatParameter.refuses_writes).
    """
    if sharding.num_shards == 1 or sharding.compute_device is not None:
        return
    own = {id(parameter) for _, parameter in parameters if parameter.is_cpu}
    for name, part in _parts_of(modules):
        is_embedding = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if is_embedding and part.max_norm is not None and id(part.weight) in own:
            raise ArgumentError(
                f"libddp fsdp: {type(part).__name__} {name!r} has max_norm={part.max_norm}: its "
                "forward writes into its weight, which the ranks of a host share while it is "
                "whole. Hint: leave the weight out (ignored_params, ignored_states), or bound the "
                "rows' norms after each step."
            )


def _parts_of(modules: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for module in modules:
        for name, part in module.named_modules():
            yield canonical(name), part
