"""The keys of train.py and sample.py with their defaults. Names follow nanoGPT where it has them.

settings = check(parse(TrainSettings, ["--n_layer=2", "--dtype=bfloat16"]))
"""

import importlib.util
from dataclasses import dataclass

from config import UserError, key

# These describe the network itself: a checkpoint can be resumed only with the same values.
MODEL_KEYS = ("n_layer", "n_head", "n_embd", "block_size", "bias")


@dataclass
class CommonSettings:
    """What the training scripts of all examples ask alike."""

    learning_rate: float = key(1e-3, "peak learning rate")
    min_lr: float = key(1e-4, "learning rate at the end of the decay")
    decay_lr: bool = key(True, "cosine decay after the warm-up")
    warmup_iters: int = key(20, "iterations of linear warm-up")
    lr_decay_iters: int = key(0, "iteration at which the decay ends; 0: MAX_ITERS")
    weight_decay: float = key(0.1, "weight decay of matrices")
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping")
    backend: str = key("auto", "backend of init_process_group: auto, gloo, nccl, ...")
    device: str = key("auto", "cpu, cuda or auto (cuda where there is one)")


@dataclass
class TrainSettings(CommonSettings):
    # Where things are.
    out_dir: str = key("out/nanogpt", "folder of checkpoint, metrics, plot and sample")
    data: str = key("", "your text: a path or fsspec URL; empty: Python's own standard library")
    data_dir: str = key("", "folder of train.bin, val.bin, meta.json; empty: OUT_DIR/data")
    corpus_mib: float = key(4.0, "size limit of the default corpus in MiB")
    # How long, and what is reported.
    init_from: str = key("auto", "auto (resume if there is a checkpoint), scratch or resume")
    max_iters: int = key(600, "iterations to train")
    extend: bool = key(False, "a complete run continues for another MAX_ITERS iterations")
    log_interval: int = key(10, "iterations between log lines")
    eval_interval: int = key(100, "iterations between evaluations, on rank 0")
    eval_iters: int = key(20, "batches per evaluation and split")
    checkpoint_seconds: float = key(60.0, "at most this much training is lost by a crash")
    tensorboard: bool = key(False, "also write TensorBoard scalars to OUT_DIR/tensorboard")
    plot: bool = key(False, "draw OUT_DIR/loss.png at the end")
    sample_tokens: int = key(500, "characters written to OUT_DIR/sample.txt at the end; 0: none")
    # The network.
    n_layer: int = key(4, "transformer blocks")
    n_head: int = key(4, "attention heads per block")
    n_embd: int = key(128, "width; a multiple of n_head")
    block_size: int = key(128, "characters of context")
    dropout: float = key(0.0, "share of activations dropped in training")
    bias: bool = key(False, "bias terms in Linear and LayerNorm")
    # The optimizer.
    batch_size: int = key(12, "sequences per micro-step")
    gradient_accumulation_steps: int = key(4, "micro-steps per iteration, shared by all ranks")
    beta1: float = key(0.9, "first beta of AdamW")
    beta2: float = key(0.99, "second beta of AdamW")
    # The machine.
    dtype: str = key("float32", "float32, bfloat16 or float16 (autocast)")
    compile: bool = key(False, "torch.compile the network")
    seed: int = key(1337, "rank r draws from seed + r")
    peak_tflops: float = key(312.0, "TFLOP/s of a GPU that count as 100% mfu (an A100 in bfloat16)")


@dataclass
class SampleSettings:
    out_dir: str = key("out/nanogpt", "folder with the checkpoint")
    start: str = key("\n", "text to continue; FILE:PATH reads it from a file")
    num_samples: int = key(1, "how many samples to print")
    max_new_tokens: int = key(500, "characters per sample")
    temperature: float = key(0.8, "below 1: bolder, above 1: more varied")
    top_k: int = key(200, "choose among this many likeliest characters")
    device: str = key("cpu", "cpu or cuda")
    seed: int = key(1337, "random seed")


def check(settings: TrainSettings) -> TrainSettings:
    """Return `settings`. Raises: UserError for values that cannot work, before anything starts."""
    one_of(settings, "init_from", ("auto", "scratch", "resume"))
    one_of(settings, "dtype", ("float32", "bfloat16", "float16"))
    check_common(settings)
    at_least(settings, "sample_tokens", 0)
    need(settings, "plot", "matplotlib", "examples")
    need(settings, "tensorboard", "tensorboard", "examples")
    return settings


def check_common(settings) -> None:
    """Of numbers that every training script has. Raises: UserError."""
    for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "max_iters"):
        at_least(settings, name, 1)
    for name in ("gradient_accumulation_steps", "log_interval", "eval_interval", "eval_iters"):
        at_least(settings, name, 1)
    for name in ("seed", "warmup_iters", "lr_decay_iters", "grad_clip", "weight_decay"):
        at_least(settings, name, 0)
    if not 0 <= settings.dropout < 1:
        raise UserError(f"--dropout={settings.dropout}: expected 0 <= dropout < 1")
    if settings.n_embd % settings.n_head:
        raise UserError(
            f"--n_embd={settings.n_embd} does not divide into --n_head={settings.n_head} heads"
        )


def need(settings, name: str, package: str, extra: str) -> None:
    """Raises: UserError if the switch `name` is on and `package` is not installed."""
    if getattr(settings, name) and importlib.util.find_spec(package) is None:
        raise UserError(f"--{name}=True needs {package}: pip install 'libddp[{extra}]'")


def one_of(settings, name: str, allowed: tuple) -> None:
    value = getattr(settings, name)
    if value not in allowed:
        raise UserError(f"--{name}={value}: expected one of {', '.join(allowed)}")


def at_least(settings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if value < least:
        raise UserError(f"--{name}={value}: expected at least {least}")
