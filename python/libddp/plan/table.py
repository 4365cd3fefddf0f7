"""Plans as text and as JSON, and which of them fits."""

from __future__ import annotations

from collections.abc import Sequence

from libddp.plan.facts import Job, Memory, ModelFacts
from libddp.plan.sizes import show_bytes

_COLUMNS = (
    "setting",
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "pass",
    "per rank",
    "per host",
    "wrapping",
)


def name_of(memory: Memory) -> str:
    return memory.setting + (" + checkpointing" if memory.recompute else "")


def choose(plans: Sequence[Memory], limit: int, process: int = 0) -> list[Memory]:
    """Those whose ranks fit into a host of `limit` bytes, the smallest first.

    `process`: bytes that each rank has before there is a model.
    """
    fitting = [p for p in plans if p.per_host + process * p.ranks_per_host <= limit]
    return sorted(fitting, key=lambda p: p.per_host)


def as_text(plans: Sequence[Memory], limit: int | None = None, process: int = 0) -> str:
    """A table, one row per setting; with a limit, a column says whether it fits."""
    rows = [[*_COLUMNS, *(["fits"] if limit else [])]]
    fitting = choose(plans, limit, process) if limit else []
    for plan in plans:
        rows.append(_row(plan) + ([("yes" if plan in fitting else "no")] if limit else []))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_line(row, widths) for row in rows)


def _row(plan: Memory) -> list[str]:
    ranks = plan.ranks_per_host
    parameters = plan.parameters + -(-plan.shared_parameters // ranks)
    sizes = (
        parameters,
        plan.gradients,
        plan.optimizer,
        plan.communication + plan.buffers,
        max(plan.activations, plan.transient),
        plan.per_rank,
        plan.step_per_host,
        plan.wrapping,
    )
    return [name_of(plan), *(show_bytes(size) for size in sizes)]


def _line(row: list[str], widths: list[int]) -> str:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  ".join(cells).rstrip()


def verdict(plans: Sequence[Memory], limit: int, process: int = 0) -> str:
    """What fits into `limit`, in a line or two."""
    fitting = choose(plans, limit, process)
    if not fitting:
        least = min(plans, key=lambda p: p.per_host)
        needs = least.per_host + process * least.ranks_per_host
        return (
            f"does not fit {show_bytes(limit)}: the smallest, {name_of(least)}, needs "
            f"{show_bytes(needs)} on a host"
        )
    lines = [_fit("", fitting[0], limit, process)]
    quick = [plan for plan in fitting if not plan.recompute]
    if fitting[0].recompute and quick:
        lines.append(_fit(" without recomputation", quick[0], limit, process))
    return "\n".join(lines)


def _fit(condition: str, plan: Memory, limit: int, process: int) -> str:
    needs = plan.per_host + process * plan.ranks_per_host
    return (
        f"smallest that fits {show_bytes(limit)}{condition}: {name_of(plan)}, "
        f"{show_bytes(needs)} on a host"
    )


def as_dict(facts: ModelFacts, job: Job, plans: Sequence[Memory]) -> dict:
    """For JSON; all sizes in bytes."""
    return {
        "parameters": sum(p.numel for p in facts.parameters),
        "parameter_bytes": facts.parameter_bytes,
        "units": len(facts.units),
        "ranks": job.ranks,
        "ranks_per_host": job.ranks_per_host,
        "settings": [_entry(plan) for plan in plans],
    }


def _entry(plan: Memory) -> dict:
    return {
        "setting": plan.setting,
        "checkpointing": plan.recompute,
        "parameters": plan.parameters,
        "shared_parameters": plan.shared_parameters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "communication": plan.communication,
        "buffers": plan.buffers,
        "activations": plan.activations,
        "transient": plan.transient,
        "per_rank": plan.per_rank,
        "state_per_host": plan.state_per_host,
        "step_per_host": plan.step_per_host,
        "wrapping_per_host": plan.wrapping,
        "per_host": plan.per_host,
    }
