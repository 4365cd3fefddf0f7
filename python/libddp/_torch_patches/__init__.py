"""What libddp replaces of torch's, in one place: a module for each thing that is replaced.

`PATCHES` lists all of it; what is not in it cannot be replaced (replacing.py), and docs/drop_in.md
shows it. Each module opens with what it replaces, why nothing less will do, who asks for it and
when it is undone. Not here is what torch offers to everybody: its registries of backends and
rendezvous handlers, and hooks on modules, tensors and optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

#: libddp.install(), `libddp run --drop-in`, LIBDDP_DROP_IN=1; undone by libddp.uninstall().
BY_DROP_IN = "the drop-in"
#: The first FullyShardedDataParallel, fully_shard(use_dtensor=False), or (norms and scaler)
#: AdamW(shard_gradients=True); for good, since the model needs it as long as it lives.
BY_SHARDING = "sharding plain tensors"
#: In the process of the launcher, for good.
BY_LAUNCHER = "`libddp run`"
#: Nobody else's torch behaves in another way; for good.
BY_WRAPPING = "wrapping a model"
BY_IMPORT = "importing libddp"


@dataclass(frozen=True)
class Patch:
    """One thing that is replaced: `owner.name` for each owner and each name."""

    #: Modules or classes.
    owners: tuple[str, ...]
    names: tuple[str, ...]
    becomes: str
    reason: str
    asked_for_by: str

    def targets(self) -> list[str]:
        """All of them, as owner.name."""
        return [".".join(pair) for pair in product(self.owners, self.names)]


_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp"
_STATE = "torch.distributed.checkpoint.state_dict"

PATCHES = (
    Patch(
        ("torch.distributed", _C10D),
        ("init_process_group", "new_group", "monitored_barrier", "batch_isend_irecv"),
        "libddp's",
        "torch makes Gloo's or NCCL's group of the names that scripts pass, its monitored barrier "
        "is Gloo's alone, and a batch has a work per operation with Gloo alone",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.distributed",),
        ("get_backend",),
        "answers the name that the script passed",
        "scripts go by it. That of distributed_c10d stays: torch builds groups from its answer",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.distributed.device_mesh",),
        ("init_process_group",),
        "libddp's",
        "`init_device_mesh` makes the group where there is none",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.nn.parallel", _DDP),
        ("DistributedDataParallel",),
        "libddp's, which has torch's private names there",
        "torch has no place for another class, and its own copies every gradient",
        BY_DROP_IN,
    ),
    Patch(
        ("torch._dynamo.convert_frame", "torch.distributed._composable.replicate"),
        ("DistributedDataParallel",),
        "stays torch's",
        "they work on the inside of torch's class",
        BY_DROP_IN,
    ),
    Patch(
        (
            f"{_DDP}.DistributedDataParallel",
            f"{_FSDP}.fully_sharded_data_parallel.FullyShardedDataParallel",
            f"{_FSDP}._fully_shard._fsdp_state.FSDPState",
        ),
        ("__init__",),
        "says once that this model is torch's",
        "a name that was imported before keeps its meaning, and nobody would notice",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.utils.checkpoint",),
        ("checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"),
        "libddp's",
        "torch has no place for another implementation, and its own runs Python for each tensor",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper",),
        ("CheckpointWrapper", "checkpoint_wrapper", "apply_activation_checkpointing"),
        "libddp's",
        "they hold torch's `checkpoint`",
        BY_DROP_IN,
    ),
    Patch(
        (_FSDP,),
        ("FullyShardedDataParallel", "fully_sharded_data_parallel"),
        "libddp's, and a module that shows it",
        "torch has no place for another class, and its own copies what the ranks of a host can "
        "share",
        BY_DROP_IN,
    ),
    Patch(
        ("sys.modules",),
        (f"{_FSDP}.fully_sharded_data_parallel",),
        "the same module",
        "scripts import from it by its path; torch's class looks itself up in torch's own",
        BY_DROP_IN,
    ),
    Patch(
        (
            _FSDP,
            f"{_FSDP}._fully_shard",
            "torch.distributed._composable.fsdp",
            "torch.distributed._composable.fsdp.fully_shard",
        ),
        (
            "FSDPModule",
            "UnshardHandle",
            "fully_shard",
            "register_fsdp_forward_method",
            "share_comm_ctx",
            "GradientReductionHandle",
        ),
        "libddp's, wherever torch shows the name",
        "as FullyShardedDataParallel",
        BY_DROP_IN,
    ),
    Patch(
        (_STATE,),
        ("FSDP",),
        "stays torch's",
        "it works on the inside of torch's class",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.autograd.variable.Variable",),
        ("_execution_engine",),
        "the same engine, which tells the models of an exception",
        "one that is raised before the pass has reached the model (in the loss) passes no hook on "
        "its way to the caller of `backward()`; where a script catches it, the others would wait",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.nn.utils.clip_grad",),
        ("_get_total_norm",),
        "the norm of whole gradients, where the given tensors are parts",
        "a rank has some rows of a sharded gradient, and the function sees no parameters that "
        "could tell",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.nn.utils",),
        ("get_total_norm",),
        "the same",
        "its public name",
        BY_DROP_IN,
    ),
    Patch(
        ("torch.nn.utils.clip_grad", "torch.nn.utils"),
        ("clip_grad_norm_",),
        "over all ranks, for sharded parameters",
        "each rank would scale its rows by another factor; scripts and trainers call torch's "
        "function, by names that they have imported before",
        BY_SHARDING,
    ),
    Patch(
        ("torch.amp.grad_scaler.GradScaler",),
        ("_unscale_grads_",),
        "asks all ranks whether a gradient is infinite, for sharded parameters",
        "a rank that skips a step alone has other weights from then on; the scaler has no hook",
        BY_SHARDING,
    ),
    Patch(
        (_STATE,),
        (
            "_get_model_state_dict",
            "_load_model_state_dict",
            "_get_optim_state_dict",
            "_load_optim_state_dict",
        ),
        "know models that libddp has sharded; others go the old way",
        "torch asks for its own FSDP class, and would save a rank's rows as whole tensors",
        BY_SHARDING,
    ),
    Patch(
        (f"{_C10D}.ProcessGroup",),
        ("_get_backend_name",),
        "of libddp's groups the name that the script passed, or Gloo's or NCCL's",
        "torch's ShardedTensors take every group but Gloo's for one of GPUs, on ranks without rows",
        BY_SHARDING,
    ),
    Patch(
        ("torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",),
        ("Popen",),
        "hands on the descriptors of the run's key and of the launcher's pipe; --preload: forks",
        "torch's launcher has no argument for descriptors",
        BY_LAUNCHER,
    ),
    Patch(
        ("torch.distributed.elastic.multiprocessing.api.PContext",),
        ("close", "wait"),
        "stops workers within --shutdown-timeout; returns as one ends, and tells how",
        "torch waits 30 s whatever its flag says, and its agent sleeps and has no hooks",
        BY_LAUNCHER,
    ),
    Patch(
        ("torch.distributed.elastic.rendezvous.dynamic_rendezvous",),
        ("_delay",),
        "a tenth of it for a few hosts",
        "torch looks once a second for what a thousand hosts write",
        BY_LAUNCHER,
    ),
    Patch(
        ("torch.distributed.elastic.rendezvous.dynamic_rendezvous",),
        ("get_method_name",),
        "the same names, from the frames alone",
        "torch looks through all files and modules for each, a dozen times in a meeting",
        BY_LAUNCHER,
    ),
    Patch(
        ("torch.distributed.elastic.rendezvous.registry",),
        ("get_rendezvous_handler",),
        "a handler that asks before each start of workers",
        "its agent has no hooks, and would repeat an error as often as --max-restarts says",
        BY_LAUNCHER,
    ),
    Patch(
        ("torch._dynamo.trace_rules",),
        ("SKIP_DIRS",),
        "has the folders of libddp's wrappers too",
        "dynamo would trace frames that communicate; it starts in the wrapped module instead",
        BY_WRAPPING,
    ),
    Patch(
        (f"{_DDP}.DistributedDataParallel",),
        ("_active_ddp_module",),
        "the model whose forward runs, while it runs",
        "dynamo asks torch's class, to cut graphs where buckets end",
        BY_WRAPPING,
    ),
    Patch(
        ("torch.distributed.pipelining.stage._PipelineStageBase",),
        ("backward_maybe_with_nosync",),
        "halves of passes of stages that `fully_shard` has sharded; refuses those of others",
        "zero-bubble schedules would train their weights not at all, or apart, without a word",
        BY_WRAPPING,
    ),
    Patch(
        ("sys",),
        ("meta_path",),
        "finds `libddp.distributed.*` that is torch's; hands over modules that are waited for",
        "Python would read torch's files a second time; importing all of torch takes seconds",
        BY_IMPORT,
    ),
)

#: target -> who asks for it
ASKED = {target: patch.asked_for_by for patch in PATCHES for target in patch.targets()}
