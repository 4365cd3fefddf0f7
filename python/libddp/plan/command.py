"""libddp plan: the memory of a training job, before it runs.

    libddp plan --gpt gpt2 --batch 8 --length 1024 --ranks 4 --limit 16GiB
    libddp plan --model model.py:GPT --model-args '{"n_layer": 12}' --batch 8 --length 1024

Prints, for DDP, ZeRO-1 and each sharding strategy of FSDP, without and with activation
checkpointing, the bytes that each rank and all ranks of a host take beyond a process without a
model. Nothing is allocated: the model runs on tensors without data. docs/planning.md says what each
column is. Exit status: 0, 1 for wrong input, 3 if nothing fits --limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn

from libddp._command_line import DTYPES, parser_of
from libddp.errors import ArgumentError
from libddp.plan import table
from libddp.plan.factory import call_factory, find_factory
from libddp.plan.facts import Job, Memory, ModelFacts, Optimizer
from libddp.plan.gpt import VOCABULARY, Gpt
from libddp.plan.model_survey import Batch, Precision, survey
from libddp.plan.observe import optimizer_cost
from libddp.plan.sizes import parse_bytes, show_bytes
from libddp.plan.strategies import SETTINGS, ZERO_1, all_settings, check

#: By the names that the command line knows.
_DTYPES = {
    name: getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(name, name))
    for name in DTYPES
}
_INPUT_DTYPES = _DTYPES | {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
NOTHING_FITS = 3


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    return run(parser_of("plan").parse_args(arguments))


def run(chosen: argparse.Namespace) -> int:
    """The same with what was chosen."""
    try:
        return _plan(chosen)
    except ArgumentError as error:
        print(f"libddp plan: {error}", file=sys.stderr)
        return 1


def _plan(chosen: argparse.Namespace) -> int:
    limit = parse_bytes(chosen.limit) if chosen.limit else None
    process = parse_bytes(chosen.process)
    dtype, param_dtype, reduce_dtype, autocast = (
        None if name is None else _DTYPES[name]
        for name in (chosen.dtype, chosen.param_dtype, chosen.reduce_dtype, chosen.autocast)
    )
    precision = Precision(dtype, param_dtype, autocast)
    job = Job(
        chosen.ranks,
        chosen.ranks_per_host or chosen.ranks,
        _itemsize(param_dtype),
        _itemsize(reduce_dtype),
        chosen.deferred,
    )
    check(job)
    optimizer = torch_optimizer(chosen.optimizer, _json("--optimizer-args", chosen.optimizer_args))
    batch = Batch(chosen.batch, chosen.length, _inputs(chosen.inputs))
    blocks = tuple(chosen.block.split(",")) if chosen.block else None
    facts = survey(_maker(chosen), batch, blocks, precision)
    plans = all_settings(facts, job, optimizer, _settings(chosen))
    fits = limit is None or bool(table.choose(plans, limit, process))
    if chosen.json:
        print(json.dumps(_with_limit(table.as_dict(facts, job, plans), plans, limit, process)))
    else:
        print(_heading(chosen, facts, job))
        print(table.as_text(plans, limit, process))
        if limit:
            print(table.verdict(plans, limit, process))
    return 0 if fits else NOTHING_FITS


def _settings(chosen: argparse.Namespace) -> list[str]:
    """ZeRO-1 is AdamW's, and not for mixed precision."""
    has_zero = chosen.optimizer.lower() in ("adamw", "libddp.adamw") and not chosen.param_dtype
    return [setting for setting in SETTINGS if setting != ZERO_1 or has_zero]


def _maker(chosen: argparse.Namespace) -> Callable[[], nn.Module]:
    if (chosen.model is None) == (chosen.gpt is None):
        raise ArgumentError(
            "which model? Hint: either --gpt SIZE, as in --gpt 12x768, or --model FILE.py:NAME."
        )
    if chosen.gpt is not None:
        vocabulary = chosen.vocabulary or VOCABULARY
        return lambda: Gpt.of_size(chosen.gpt, length=chosen.length, vocabulary=vocabulary)
    factory = find_factory(chosen.model)
    arguments = _json("--model-args", chosen.model_args, dict, list)
    return lambda: call_factory(factory, arguments)


def torch_optimizer(name: str, arguments: dict | None = None) -> Optimizer:
    """What an optimizer costs, by the name of a class in torch.optim, in any case, or
    "libddp.adamw".

    Raises:
        ArgumentError: no such optimizer; or, when it is asked, arguments that it does not take.
    """
    given = dict(arguments or {})
    wanted = name.lower()
    if wanted == "libddp.adamw":  # the same kernel, the same state
        wanted, given = "adamw", {**given, "fused": True}
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    found = classes.get(wanted)
    if found is None or found is torch.optim.Optimizer:
        names = ", ".join(sorted({*classes, "libddp.adamw"} - {"optimizer"}))
        raise ArgumentError(f"--optimizer {name!r} is unknown. Hint: one of {names}.")

    def cost(sizes):
        try:
            return optimizer_cost(lambda parameters: found(parameters, **given), sizes)
        except Exception as error:
            raise ArgumentError(
                f"--optimizer {name}: {type(error).__name__}: {error}. Hint: --optimizer-args "
                "takes the optimizer's arguments as JSON; one that needs a closure, or reads "
                "values, cannot be planned for."
            ) from error

    return cost


def _json(option: str, text: str, *kinds: type) -> dict | list:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            f"{option} is no JSON: {error}. Hint: quote it for the shell, as in "
            f"{option} '{{\"lr\": 0.1}}'."
        ) from error
    if not isinstance(value, kinds or (dict,)):
        raise ArgumentError(f'{option} is a {type(value).__name__}. Hint: write {{"name": value}}.')
    return value


def _inputs(text: str | None) -> tuple:
    """ "float32:3x224x224,int64:" -> dtypes and shapes behind the batch dimension."""
    found = []
    for part in text.split(",") if text else ():
        dtype, _, shape = part.partition(":")
        sizes = [size for size in shape.split("x") if size]
        if dtype not in _INPUT_DTYPES or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise ArgumentError(
                f"--inputs {part!r} is no input. Hint: DTYPE:SHAPE without the batch dimension, "
                f"one for each argument, as in float32:3x224x224,int64: (dtypes: "
                f"{', '.join(_INPUT_DTYPES)})."
            )
        found.append((_INPUT_DTYPES[dtype], tuple(int(size) for size in sizes)))
    return tuple(found)


def _itemsize(dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else dtype.itemsize


def _with_limit(result: dict, plans: list[Memory], limit: int | None, process: int) -> dict:
    if limit is not None:
        fitting = table.choose(plans, limit, process)
        result["limit"], result["process"] = limit, process
        result["fitting"] = [table.name_of(plan) for plan in fitting]
    return result


def _heading(chosen: argparse.Namespace, facts: ModelFacts, job: Job) -> str:
    numel = sum(p.numel for p in facts.parameters)
    blocks = f"{len(facts.units) - 1} blocks" if len(facts.units) > 1 else "no blocks (see --block)"
    return (
        f"{numel / 1e6:.1f} M parameters ({show_bytes(facts.parameter_bytes)}) in {blocks}; "
        f"{job.ranks} ranks, {job.ranks_per_host} per host; batch {chosen.batch} x {chosen.length} "
        f"per rank; {chosen.optimizer}\n"
        "bytes beyond a process without a model; per rank and per host: at the peak of a step\n"
        "offload: none of these changes with CPUOffload: parameters are on the CPU\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
