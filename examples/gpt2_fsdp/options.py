"""The keys of train_fsdp.py with their defaults. Names follow nanoGPT and torch where they can.

options = check(parse(Options, ["--sharding_strategy=SHARD_GRAD_OP", "--n_layer", "2"]))
"""

import difflib
from dataclasses import dataclass, fields

import engine
from shared import (
    Attention,
    Block,
    CommonSettings,
    FeedForward,
    UserError,
    at_least,
    check_common,
    key,
    need,
    one_of,
)

#: Classes of which --activation_checkpointing can recompute the activations.
RECOMPUTABLE = {kind.__name__: kind for kind in (Block, Attention, FeedForward)}
#: These describe a network that starts from random weights.
SHAPE_KEYS = ("n_layer", "n_head", "n_embd", "vocab_size", "bias")


@dataclass
class Options(CommonSettings):
    # Where things are.
    out_dir: str = key("out/gpt2_fsdp", "folder of checkpoints and metrics; all ranks must see it")
    data_dir: str = key("out/gpt2_fsdp/data", "folder that convert.py wrote")
    # The network: pretrained, or random in this shape.
    hf_model: str = key("", "gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder or a .safetensors")
    n_layer: int = key(4, "transformer blocks")
    n_head: int = key(4, "attention heads per block")
    n_embd: int = key(128, "width; a multiple of n_head")
    vocab_size: int | None = key(None, "size of the vocabulary; None: that of the data")
    bias: bool = key(True, "bias terms in Linear and LayerNorm")
    block_size: int = key(128, "tokens of context; at most 1024 with the weights of GPT-2")
    dropout: float = key(0.0, "share of activations dropped in training")
    seed: int = key(1337, "of weights, data order and dropout")
    # How long, and what is reported and kept.
    init_from: str = key("auto", "auto (resume if there is a checkpoint), scratch or resume")
    max_iters: int = key(300, "iterations to train")
    log_interval: int = key(10, "iterations between log lines")
    eval_interval: int = key(100, "iterations between evaluations")
    eval_iters: int = key(20, "batches per evaluation, shared by all ranks")
    save_interval: int = key(100, "iterations between checkpoints")
    keep_checkpoints: int = key(2, "so many of the newest checkpoints stay")
    checkpoint: str = key("sharded", "sharded (each rank writes its part) or full (whole tensors)")
    tensorboard: bool = key(False, "also write TensorBoard scalars to OUT_DIR/tensorboard")
    # The optimizer.
    batch_size: int = key(4, "sequences per micro-step")
    gradient_accumulation_steps: int = key(6, "micro-steps per iteration, shared by all ranks")
    betas: tuple[float, float] = key((0.9, 0.95), "betas of AdamW")
    # How the network is spread over the ranks.
    engine: str = key(engine.DEFAULT, "whose FSDP: torch or libddp")
    sharding_strategy: str = key("FULL_SHARD", "or SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD")
    mixed_precision: str = key("fp32", "fp32, bf16 or fp16")
    activation_checkpointing: tuple[str, ...] = key(
        (), "classes to recompute: Block, Attention, ..."
    )
    cpu_offload: bool = key(False, "parameters and gradients rest in host memory")
    no_sync: bool = key(True, "only the last micro-step reduces; needs room for whole gradients")
    limit_all_gathers: bool = key(True, "at most two blocks are gathered ahead")


def check(options: Options) -> Options:
    """Return `options`. Raises: UserError for values that cannot work, before anything starts."""
    one_of(options, "init_from", ("auto", "scratch", "resume"))
    one_of(options, "checkpoint", ("sharded", "full"))
    one_of(options, "engine", engine.ENGINES)
    one_of(options, "sharding_strategy", engine.STRATEGIES)
    one_of(options, "mixed_precision", engine.PRECISIONS)
    check_common(options)
    for name in ("save_interval", "keep_checkpoints"):
        at_least(options, name, 1)
    _check_shape(options)
    recomputed(options)
    if options.engine == "torch" and (options.snapshot_every or options.snapshot_storage):
        raise UserError(
            "--snapshot_every: libddp.Snapshot keeps what --engine=libddp has sharded; with "
            "--engine=torch leave it out, --save_interval says how often there is a checkpoint"
        )
    need(options, "tensorboard", "tensorboard", "gpt2")
    return options


def _check_shape(options: Options) -> None:
    """Pretrained weights bring their shape along: another one on the command line is a mistake."""
    defaults = {field.name: field.default for field in fields(Options)}
    for name in SHAPE_KEYS:
        if options.hf_model and getattr(options, name) != defaults[name]:
            raise UserError(
                f"--{name}={getattr(options, name)}: the shape comes with "
                f"--hf_model={options.hf_model}; leave one of the two out"
            )


def recomputed(options: Options) -> tuple[type, ...]:
    """The classes of --activation_checkpointing."""
    for name in options.activation_checkpointing:
        if name not in RECOMPUTABLE:
            near = difflib.get_close_matches(name, RECOMPUTABLE, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(RECOMPUTABLE)}"
            raise UserError(f"--activation_checkpointing: there is no class {name}; {hint}")
    return tuple(RECOMPUTABLE[name] for name in options.activation_checkpointing)
