"""Backward passes of pipeline stages in two halves, as zero-bubble schedules make them.

The first half computes the gradients of a stage's inputs, and keeps those of the nodes where the
graphs of weights begin; the second one, later, computes the gradients of the weights from there.
torch looks for the weights in `module.parameters()`, where a sharded module has rows, which are not
in the graph, and writes gradients into `.grad` itself. Here both halves have the whole weights, and
the second one is a backward pass like others of the unit's, which averages gradients, or leaves
them for when the schedule asks for the average.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from libddp.distributed.fsdp._fsdp_module import FSDPModule
from libddp.distributed.fsdp.wrap._lookup import wrapped_modules_in
from libddp.distributed.fsdp.wrap._wrapped_module import WrappedModule, model_of


def halves_of(module: torch.nn.Module):
    """See split_backward.FindHalves: of a stage that is sharded as a whole, by fully_shard."""
    return partial(_run_half, module) if isinstance(module, FSDPModule) else None


def _run_half(module: FSDPModule, half: str, known: dict[str, Any]) -> tuple:
    from torch.distributed.pipelining import stage

    if isinstance(module, stage.FSDPModule):  # the stage does it, and has the sums averaged
        module.set_requires_gradient_sync(False)
    units = list(wrapped_modules_in(module))
    for wrapped in units:
        wrapped.hold()
    if half == "weight":
        _backward_weights(units, known["param_groups"])
        return (), None
    weights = {id(leaf): leaf for wrapped in units for leaf in wrapped.leaves()}
    # Those that are not sharded.
    weights.update((id(p), p) for p in module.parameters() if p.is_leaf)
    return stage.stage_backward_input(
        known["stage_output"],
        known["output_grads"],
        known["input_values"],
        iter(weights.values()),
    )


def _backward_weights(units: list[WrappedModule], groups: list[dict[str, Any]]) -> None:
    """`groups`: what stage_backward_input gives; emptied, as memory hangs on them."""
    unit_of = {id(leaf): wrapped for wrapped in units for leaf in wrapped.leaves()}
    leaves = [[node.variable for node in group["params"]] for group in groups]
    reached = [unit_of[id(leaf)] for group in leaves for leaf in group if id(leaf) in unit_of]

    def run() -> None:
        for wrapped in dict.fromkeys(reached):
            model_of(wrapped).reach_from_within(wrapped.unit)
        for group, weights in zip(groups, leaves, strict=True):
            _backward_group(group, weights)

    # One pass around those of the groups: what happens at the end of a pass happens once.
    begin = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        end = _Around.apply(begin, run)
    end.backward()


def _backward_group(group: dict[str, Any], weights: list[torch.Tensor]) -> None:
    """Of weights whose graphs begin at the same nodes (`intermediates`)."""
    nodes, gradients = group.pop("intermediates"), group.pop("grads", None)
    if gradients is None:  # the first half has not come here
        return
    roots = [
        (GradientEdge(node, index), gradient)
        for node, of_node in zip(nodes, gradients, strict=True)
        for index, gradient in enumerate(of_node or ())
        if gradient is not None
    ]
    if not roots:
        return
    handles = []
    if len(nodes) > 1:  # one of them may lie behind another, which would pass its gradient on
        for node, of_node in zip(nodes, gradients, strict=True):
            handles.append(node.register_prehook(lambda _, own=of_node: own))
    try:
        edges, values = zip(*roots, strict=True)
        torch.autograd.backward(edges, values, inputs=weights)
    finally:
        for handle in handles:
            handle.remove()


class _Around(torch.autograd.Function):
    """Runs a function in its backward."""

    @staticmethod
    def forward(ctx, begin, run):
        ctx.run = run
        return begin.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.run()
        return None, None
