"""Memory of a training job before it runs: `libddp plan`, and the same from Python.

    facts = survey(lambda: GPT(config), Batch(size=8, length=1024))
    for memory in all_settings(facts, Job(ranks=8, ranks_per_host=8), torch_optimizer("adamw")):
        print(memory.setting, memory.recompute, memory.per_rank)

See docs/planning.md for what each figure means.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libddp.plan.command import main, torch_optimizer
    from libddp.plan.facts import Job, Memory, ModelFacts, OptimizerCost, Parameter
    from libddp.plan.model_survey import Batch, Precision, survey
    from libddp.plan.strategies import all_settings

#: Imported when they are asked for: the command line parses before torch is there.
_PLACES = {
    "command": ("main", "torch_optimizer"),
    "facts": ("Job", "Memory", "ModelFacts", "OptimizerCost", "Parameter"),
    "strategies": ("all_settings",),
    "model_survey": ("Batch", "Precision", "survey"),
}

__all__ = [
    "Batch",
    "Job",
    "Memory",
    "ModelFacts",
    "OptimizerCost",
    "Parameter",
    "Precision",
    "all_settings",
    "main",
    "survey",
    "torch_optimizer",
]


def __getattr__(name: str):
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(f"libddp.plan.{place}"), name)
    raise AttributeError(f"module 'libddp.plan' has no attribute {name!r}")
