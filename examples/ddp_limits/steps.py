"""The steps by which a model is made to fit, and the settings of a measurement.

STEPS[3].name, STEPS[3].words       # "recompute", "... checkpoint_sequential"
"""

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from borrowed import UserError, at_least, engine, key


class Step(NamedTuple):
    """One row of the table. Each step but the first two adds one thing to the step before it."""

    name: str
    words: str
    accumulate: bool = False
    bf16: bool = False
    recompute: bool = False
    fsdp: bool = False
    offload: bool = False


STEPS = (
    Step("baseline", "DDP"),
    Step("accumulate", "+ gradient accumulation", accumulate=True),
    Step("bf16", "+ AMP in bf16", accumulate=True, bf16=True),
    Step("recompute", "+ checkpoint_sequential", accumulate=True, bf16=True, recompute=True),
    Step("fsdp", "FSDP instead of DDP", accumulate=True, bf16=True, recompute=True, fsdp=True),
    Step("offload", "+ CPU offload", True, True, True, True, True),
)
NAMES = tuple(step.name for step in STEPS)


@dataclass
class LimitSettings:
    out_dir: str = key("out/ddp_limits", "folder of limits.json and limits.png")
    ranks: int = key(2, "ranks on this host")
    steps: tuple[str, ...] = key(NAMES, "the steps to measure")
    n_layer: int = key(8, "transformer blocks")
    n_head: int = key(8, "attention heads per block")
    n_embd: int = key(320, "width; a multiple of n_head")
    vocab_size: int = key(4096, "size of the vocabulary")
    block_size: int = key(256, "tokens of context")
    batch_size: int = key(8, "sequences of a rank and iteration")
    micro_steps: int = key(4, "parts of a batch with gradient accumulation")
    segments: int = key(4, "segments of checkpoint_sequential")
    iterations: int = key(3, "measured iterations; one more goes before them")
    engine: str = key(engine.DEFAULT, "whose FSDP: torch or libddp")
    backend: str = key("auto", "backend of init_process_group: auto, gloo, nccl, ...")
    device: str = key("auto", "cpu, cuda or auto (cuda where there is one)")
    limit_mib: int | None = key(None, "private memory that a rank may take for training; None: all")
    seconds: float = key(600.0, "a step that takes longer is ended")
    plot: bool = key(True, "draw OUT_DIR/limits.png")


def check(settings: LimitSettings) -> LimitSettings:
    """Return `settings`. Raises: UserError for values that cannot work."""
    for name in ("ranks", "n_layer", "n_head", "n_embd", "vocab_size", "block_size"):
        at_least(settings, name, 1)
    for name in ("batch_size", "micro_steps", "segments", "iterations"):
        at_least(settings, name, 1)
    for name in settings.steps:
        find(name)
    if settings.limit_mib is not None:
        at_least(settings, "limit_mib", 1)
    if settings.batch_size % settings.micro_steps:
        raise UserError(
            f"--batch_size={settings.batch_size} does not divide into "
            f"--micro_steps={settings.micro_steps}"
        )
    if settings.n_embd % settings.n_head or settings.segments > settings.n_layer:
        raise UserError("--n_embd must be a multiple of --n_head, --segments at most --n_layer")
    return settings


def find(name: str) -> Step:
    """The step of this name. Raises: UserError."""
    if name not in NAMES:
        raise UserError(f"--steps: there is no step {name!r}; there are {', '.join(NAMES)}")
    return STEPS[NAMES.index(name)]


def arguments(settings: LimitSettings) -> list[str]:
    """The command line that gives these settings again."""
    values = asdict(settings) | {"steps": ",".join(settings.steps)}
    return [f"--{field.name}={values[field.name]}" for field in fields(settings)]
