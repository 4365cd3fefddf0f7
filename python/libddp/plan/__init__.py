"""Memory of a training job before it runs: `libddp plan`, and the same from Python.

    facts = survey(lambda: GPT(config), Batch(size=8, length=1024))
    for memory in all_settings(facts, Job(ranks=8, ranks_per_host=8), torch_optimizer("adamw")):
        print(memory.setting, memory.recompute, memory.per_rank)

See docs/planning.md for what each figure means.
"""

from libddp.plan.command import main, torch_optimizer
from libddp.plan.facts import Job, Memory, ModelFacts, OptimizerCost, Parameter
from libddp.plan.strategies import all_settings
from libddp.plan.survey import Batch, Precision, survey

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
