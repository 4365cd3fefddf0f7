"""From a way to make a model and a batch to ModelFacts.

facts = survey(lambda: GPT(config), Batch(size=8, length=1024), blocks=("Block",))
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from libddp.errors import ArgumentError
from libddp.plan.facts import ModelFacts, Parameter, Pass
from libddp.plan.observe import observe_pass

#: Names of a forward's second parameter that mean "the same shape again".
_TARGETS = ("targets", "target", "labels", "label", "y")


@dataclass(frozen=True)
class Batch:
    """What a rank computes with in one pass.

    Token ids of [size, length], and targets like them where forward takes some; or `inputs`: the
    dtype and the shape behind the batch dimension of each argument.
    """

    size: int
    length: int = 1
    inputs: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()

    def make(self, model: nn.Module, dtype: torch.dtype | None) -> list[torch.Tensor]:
        """`dtype`: floating-point inputs are converted to it."""
        if not self.inputs:
            tokens = torch.zeros((self.size, self.length), dtype=torch.long)
            names = list(inspect.signature(model.forward).parameters)
            return [tokens] * (2 if len(names) > 1 and names[1] in _TARGETS else 1)
        made = [torch.zeros((self.size, *shape), dtype=given) for given, shape in self.inputs]
        return [t.to(dtype) if dtype and t.is_floating_point() else t for t in made]


@dataclass(frozen=True)
class Precision:
    """`dtype`: of the parameters. `compute`: what FSDP or DDP convert them to."""

    dtype: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    autocast: torch.dtype | None = None


def survey(
    make_model: Callable[[], nn.Module],
    batch: Batch,
    blocks: Sequence[str] | None = None,
    precision: Precision | None = None,
) -> ModelFacts:
    """Runs one pass without and one with recomputed blocks; neither takes memory.

    Args:
        make_model: called under a FakeTensorMode: its tensors have no data.
        blocks: names of the classes that are wrapped and recomputed; None = found, see find_blocks.

    Raises:
        ArgumentError: a batch of nothing, no such class, a model that does not run.
    """
    precision = precision or Precision()
    if batch.size < 1 or batch.length < 1:
        raise ArgumentError(
            f"a batch of {batch.size} x {batch.length} is nothing to compute. Hint: --batch and "
            "--length are one at least; they are those of one rank."
        )
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model()
        convert(model, precision.dtype)
        names = find_blocks(model) if blocks is None else check_blocks(model, blocks)
        units = unit_modules(model, names)
        parameters = _parameters(model, units)
        if not any(p.trained for p in parameters):
            raise ArgumentError(
                "the model has no parameter that is trained. Hint: name the factory of a model "
                "whose parameters require gradients."
            )
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        plain = _run(model, batch, precision, list(units.values()))
        recomputed = _run_recomputed(model, names, batch, precision, units) if names else None
    return ModelFacts(tuple(parameters), tuple(units), plain, recomputed, buffers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs the stack of an operation that fails without data; our error says it in a line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """As model.to(dtype) does with parameters; it refuses tensors without data. Ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if not old.is_floating_point() or old.dtype == dtype:
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(old.detach().to(dtype), old.requires_grad)
            setattr(module, name, made[id(old)])


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The class of which a list or sequence in the model has several, the largest such list."""
    best, most = (), 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kind, count = Counter(type(child).__name__ for child in module).most_common(1)[0]
        numel = sum(p.numel() for p in module.parameters())
        if count > 1 and numel > most:
            best, most = (kind,), numel
    return best


def check_blocks(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"--block {name}: the model has no module of that class. Hint: it has "
                f"{', '.join(sorted(known))}."
            )
    return tuple(names)


def unit_modules(model: nn.Module, blocks: Sequence[str]) -> dict[str, nn.Module]:
    """Name -> module: the root, and every module of a block class."""
    found = {name: m for name, m in model.named_modules() if type(m).__name__ in blocks}
    return {"": model} | found


def _parameters(model: nn.Module, units: dict[str, nn.Module]) -> list[Parameter]:
    """In the order of model.parameters(); each belongs to the innermost unit that has it, and to
    the root if several have it."""
    owner: dict[int, int] = {}
    for unit, module in enumerate(units.values()):
        inside = {id(p) for p in module.parameters()}
        for key in inside:
            outer = list(units.values())[owner.get(key, 0)]
            is_inner = any(module is child for child in outer.modules())
            owner[key] = unit if is_inner else 0
    return [
        Parameter(name, tuple(p.shape), p.element_size(), p.requires_grad, owner[id(p)])
        for name, p in model.named_parameters()
    ]


def _run_recomputed(model, names, batch, precision, units) -> Pass:
    from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ in names)
    return _run(model, batch, precision, list(units.values()))


def _run(model: nn.Module, batch: Batch, precision: Precision, units: Sequence[nn.Module]) -> Pass:
    if precision.compute:
        convert(model, precision.compute)

    def loss_of() -> tuple[torch.Tensor, Any]:
        with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None):
            outputs = model(*batch.make(model, precision.compute))
            return _loss_in(outputs), outputs

    try:
        return observe_pass(model, loss_of, units)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"the model does not run: {_words(error)}. Hint: by default forward "
            "gets token ids [batch, length], and targets like them; say what it takes with "
            "--inputs. Its tensors have no data, so it cannot read values (.item(), if tensor)."
        ) from error


def _words(error: Exception) -> str:
    """Its type and the first line of its text, without the full stop."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"


def _loss_in(outputs: Any) -> torch.Tensor:
    """The last scalar among them that can be trained, as in (logits, loss); else a mean of all."""
    values = outputs.values() if isinstance(outputs, Mapping) else tree_leaves(outputs)
    tensors = [t for t in values if isinstance(t, torch.Tensor) and t.requires_grad]
    scalars = [t for t in tensors if t.dim() == 0]
    if scalars:
        return scalars[-1]
    if not tensors:
        raise ArgumentError(
            "the model returned no tensor that depends on its parameters. Hint: plan for the "
            "module whose output, or part of it, is the loss."
        )
    return sum(t.float().mean() for t in tensors)
