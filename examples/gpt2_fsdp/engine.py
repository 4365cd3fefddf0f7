"""The only module that knows where FSDP comes from, and what wraps a network.

    engine = load("torch")
    model = engine.FullyShardedDataParallel(net, auto_wrap_policy=...)

libddp carries torch's names under its own paths, so an engine is a first word: `torch` or `libddp`.
An engine that is not there is an error; nothing steps in for it.
"""

import contextlib
import importlib.util
import re
import warnings
from functools import partial
from types import SimpleNamespace

import torch
from libddp.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from shared import Block, UserError

#: libddp's, where the library that is installed has it. A run says which it uses.
DEFAULT = "libddp" if importlib.util.find_spec("libddp.distributed.fsdp") else "torch"
ENGINES = ("torch", "libddp")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
PRECISIONS = ("fp32", "bf16", "fp16")
#: Where each name stands, behind the first word.
PLACES = {
    "distributed.fsdp": (
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "FullyShardedDataParallel",
        "MixedPrecision",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictType",
    ),
    "distributed.fsdp.wrap": ("transformer_auto_wrap_policy",),
}
#: What torch's engine says about itself on every rank and every save; none of it is up to the user.
TORCH_NOISE = (
    "FSDP.state_dict_type",
    "Please use DTensor instead",
    "`_get_pg_default_device` will be deprecated",
    "When using ``NO_SHARD``",
    "FSDP is switching to use `NO_SHARD`",
    "The `NO_SHARD` sharding strategy is deprecated",
)


def load(name: str) -> SimpleNamespace:
    """Every name of PLACES from the engine `name`. Raises: UserError if it has not all of them."""
    if name not in ENGINES:
        raise UserError(f"--engine={name}: expected one of {', '.join(ENGINES)}")
    if name == "torch":
        for words in TORCH_NOISE:
            warnings.filterwarnings("ignore", message=re.escape(words))
    engine = SimpleNamespace(name=name)
    for place, names in PLACES.items():
        path = f"{name}.{place}"
        try:
            module = importlib.import_module(path)
            for each in names:
                setattr(engine, each, getattr(module, each))
        except (ImportError, AttributeError) as error:
            hint = "--engine=torch runs torch's own" if name == "libddp" else "update torch"
            raise UserError(f"--engine={name}: no {path} here ({error}); {hint}") from error
    return engine


def wrap(engine, net: torch.nn.Module, options, device: torch.device) -> torch.nn.Module:
    """Shard `net` as the options say, one unit per transformer block. Raises: UserError."""
    check(engine, options, device)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[options.mixed_precision]
    # Gradients are summed in float32: the sum over many ranks would lose what bf16 cannot hold.
    precision = dtype and engine.MixedPrecision(
        param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=dtype
    )
    return engine.FullyShardedDataParallel(
        net,
        auto_wrap_policy=partial(
            engine.transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        sharding_strategy=engine.ShardingStrategy[options.sharding_strategy],
        mixed_precision=precision,
        cpu_offload=engine.CPUOffload(offload_params=True) if options.cpu_offload else None,
        device_id=device,
        limit_all_gathers=options.limit_all_gathers,
        use_orig_params=True,
    )


def check(engine, options, device: torch.device) -> None:
    """What torch's engine does wrong without saying so is refused here."""
    if engine.name != "torch" or device.type != "cpu":
        return
    if options.cpu_offload:
        raise UserError("--cpu_offload=True: with --device=cpu the parameters are there already")
    if options.sharding_strategy == "HYBRID_SHARD":
        raise UserError(
            "--sharding_strategy=HYBRID_SHARD: torch's FSDP does not average gradients with it on "
            "CPUs; use FULL_SHARD, or --engine=libddp"
        )


def recompute(model: torch.nn.Module, classes: tuple[type, ...]) -> None:
    """Drop the activations of every module of these classes and compute them anew in backward.

    libddp's own checkpointing, whichever the engine.
    """
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, classes)
    )


@contextlib.contextmanager
def state_type(engine, model: torch.nn.Module, kind: str, offload: bool):
    """State dicts in here are `sharded` (each rank its part) or `full` (each rank everything)."""
    types = engine.StateDictType
    if kind == "sharded":
        settings = (
            types.SHARDED_STATE_DICT,
            engine.ShardedStateDictConfig(offload_to_cpu=offload),
            engine.ShardedOptimStateDictConfig(offload_to_cpu=offload),
        )
    else:
        settings = (
            types.FULL_STATE_DICT,
            engine.FullStateDictConfig(offload_to_cpu=offload, rank0_only=False),
            engine.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=False),
        )
    with engine.FullyShardedDataParallel.state_dict_type(model, *settings):
        yield
