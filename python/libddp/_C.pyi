"""Types of the extension module. Users go through libddp.distributed and libddp.nn.parallel."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Store, Work

BACKEND_NAME: str

class ProcessGroup:
    """Ranks that communicate. Synchronous calls return None, asynchronous ones a Work."""

    timeout: timedelta

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def name(self) -> str: ...
    def global_ranks(self) -> list[int]: ...
    def backend_name(self) -> str: ...
    def sequence_number(self) -> int: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
        label: str = "",
    ) -> Work | None: ...
    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: ReduceOp = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def all_reduce_sparse(self, tensor: Tensor) -> None: ...
    def reduce(
        self,
        tensor: Tensor,
        root: int,
        op: ReduceOp = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: ReduceOp = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def reduce_scatter_into(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def broadcast(
        self, tensor: Tensor, root: int, async_op: bool = False, timeout: timedelta | None = None
    ) -> Work | None: ...
    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def all_gather_into(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        root: int,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        root: int,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def all_to_all(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int] = ...,
        input_splits: Sequence[int] = ...,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    def send(
        self,
        tensor: Tensor,
        target: int,
        tag: int = 0,
        async_op: bool = False,
        timeout: timedelta | None = None,
    ) -> Work | None: ...
    @overload
    def recv(
        self,
        tensor: Tensor,
        source: int | None = None,
        tag: int = 0,
        async_op: Literal[False] = False,
        timeout: timedelta | None = None,
    ) -> int: ...
    @overload
    def recv(
        self,
        tensor: Tensor,
        source: int | None,
        tag: int,
        async_op: Literal[True],
        timeout: timedelta | None = None,
    ) -> Work: ...
    def barrier(self, async_op: bool = False, timeout: timedelta | None = None) -> Work | None: ...
    def allocate(
        self, sizes: Sequence[int], dtype: torch.dtype = ..., device: torch.device = ...
    ) -> Tensor: ...
    def moves(self, tensor: Tensor) -> bool: ...
    def split(self, ranks: Sequence[int], name: str) -> ProcessGroup | None: ...
    def abort(self, reason: str) -> None: ...
    def report_error(self, what: str) -> None: ...
    def flight_log(self) -> str: ...
    def retract_error(self) -> None: ...
    def check(self) -> None: ...
    def has_failed(self) -> bool: ...
    def shutdown(self) -> None: ...

class MixedPrecision:
    """None = as the model has it."""

    def __init__(
        self,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
    ) -> None: ...

class DistributedDataParallelOptions:
    """libddp/ddp/options.h"""

    cap_bytes: int
    first_bytes: int
    hook_first_bytes: int
    each_bytes: list[int]
    find_unused_parameters: bool
    static_graph: bool
    skip_unused_buckets: bool
    gradient_as_bucket_view: bool | None
    sparse_parameters: list[str]
    broadcast_buffers: bool
    init_sync: bool
    init_sync_buffers: bool
    mixed_precision: MixedPrecision

class ReplicatedModel:
    """The C++ side of libddp.nn.parallel.DistributedDataParallel."""

    def __init__(
        self,
        *,
        parameters: Sequence[tuple[str, Tensor]],
        buffers: Sequence[tuple[str, Tensor]],
        group: ProcessGroup,
        options: DistributedDataParallelOptions,
        delayed: Sequence[tuple[str, Tensor]],
        delayed_until: Tensor | None,
    ) -> None: ...
    def rejoin(
        self,
        group: ProcessGroup,
        *,
        buffers: Sequence[tuple[str, Tensor]],
        options: DistributedDataParallelOptions,
    ) -> None: ...
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None: ...
    def before_forward(self) -> None: ...
    def forward_failed(self, what: str, sync: bool) -> None: ...
    def backward_failed(self, what: str) -> bool: ...
    def after_forward(self, output: Any, sync: bool) -> bool: ...
    def set_manual_finish(self, manual: bool) -> None: ...
    def finishes_after_backward(self) -> bool: ...
    def finish_backward(self) -> None: ...
    def check_finished(self) -> None: ...
    def set_static_graph(self) -> None: ...
    def run_empty_pass(self) -> None: ...
    def set_gradient_scale(self, scale: float) -> None: ...
    def register_comm_hook(self, state: Any, hook: Any) -> None: ...
    def register_compress_hook(self, dtype: torch.dtype) -> None: ...
    def bucket_plan(self) -> list[list[int]]: ...
    def group(self) -> ProcessGroup: ...
    def layout(
        self,
    ) -> tuple[bool, bool, list[tuple[list[str], torch.dtype, int, int, bool]], list[str]]: ...
    def timings(self) -> tuple[list[tuple], list[tuple]]: ...
    def wait_shares(self) -> list[float]: ...
    def shard_adamw(self, parameters: Sequence[Tensor], shard_gradients: bool) -> AdamwShards: ...

class AdamwShards:
    """What a rank has of an AdamW whose work is shared over the ranks."""

    @property
    def moment_names(self) -> list[str]: ...
    @property
    def parameters(self) -> list[Tensor]: ...
    @property
    def is_ready(self) -> bool: ...
    def check(self, parameters: Sequence[Tensor]) -> None: ...
    def check_member(self) -> None: ...
    def check_averaged(self) -> None: ...
    def make_ready(self, amsgrad: bool) -> bool: ...
    def begin_update(self) -> None: ...
    def update(
        self,
        parameters: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None: ...
    def publish(self) -> None: ...
    def own_gradient(self, parameter: Tensor) -> Tensor: ...
    def new_moments(self, parameter: Tensor) -> list[Tensor]: ...
    def load_moments(self, parameter: Tensor, whole: Sequence[Tensor | None]) -> list[Tensor]: ...
    def whole_moments(self, parameter: Tensor) -> list[Tensor]:
        """Copies in the parameter's shape; a collective between hosts."""

HAS_RECONFIGURE: bool

def build_info() -> dict[str, Any]: ...
def create_backend(
    options: Any,
    pg_options: Any,
    inter: Any = None,
    wire_dtype: torch.dtype | None = None,
    sockets_per_link: int | None = None,
) -> Any: ...
def dump_stacks() -> str: ...
def from_c10d(
    group: Any,
    name: str = "",
    global_ranks: list[int] = ...,
    timeout: timedelta | None = None,
) -> ProcessGroup: ...
def group_of_backend(backend: Any) -> ProcessGroup | None: ...
def prepare_straight(c10d: Any, find: Any, natives: Any, parameter: type) -> None: ...
def forget_straight() -> None: ...
def straight(group: Any, tensor: Any) -> ProcessGroup | None: ...
def straight_all_reduce(group: Any, tensor: Any, op: Any, async_op: bool) -> Any: ...
def straight_all_gather_into(group: Any, output: Any, input: Any, async_op: bool) -> Any: ...
def straight_reduce_scatter_into(
    group: Any, output: Any, input: Any, op: Any, async_op: bool
) -> Any: ...
def is_reconfigurable(backend: Any) -> bool: ...
def members_of(backend: Any) -> ProcessGroup: ...
def drop_batch(backend: Any) -> None: ...
def run_key_tag(parts: Sequence[bytes]) -> bytes | None: ...
def rendezvous(
    init_method: str,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    timeout: timedelta,
) -> tuple[Store, int, int, tuple[str, str]]: ...
def remember_store(place: str, name: str) -> None: ...

class StopReplay(BaseException):
    """Ends the replay of a checkpointed block."""

class CheckpointSettings:
    """How a checkpointed block is recomputed."""

    def __init__(
        self,
        preserve_random: bool = True,
        stop_early: bool | None = None,
        check_determinism: bool = True,
    ) -> None: ...

def checkpoint(
    function: Callable,
    replay: Callable,
    name_of: Callable[[Callable], str],
    settings: CheckpointSettings,
    args: tuple,
    kwargs: dict[str, Any],
    on_error: Callable[[str], None] | None = None,
    runs: tuple[SavingRun, ReplayRun] | None = None,
) -> Any: ...
def checkpoint_node(
    function: Callable,
    name_of: Callable[[Callable], str],
    preserve_random: bool,
    args: tuple,
    parameters: Sequence[Tensor] = (),
    is_reentrant: bool = True,
) -> Any: ...

class OperatorSet:
    """Operators whose results are kept."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None: ...

class SavingRun:
    """A forward pass that keeps results."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...

class ReplayRun:
    """A replay that is handed kept results."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...

def can_keep_results() -> bool: ...
def selective_contexts(
    operators: OperatorSet, allow_mutation: bool
) -> tuple[SavingRun, ReplayRun]: ...
def show_faces(rows: list[tuple], sharded: bool) -> None: ...
def are_faces_settled(rows: list[tuple]) -> bool: ...
def alias_of(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor of its own that begins there."""

class ParamGroup:
    """The parameters of one sharded module; what goes around its forward and backward."""

    def __init__(
        self,
        *,
        name: str,
        parameters: Sequence[tuple[str, Tensor]],
        shard: ProcessGroup | None,
        replicate: ProcessGroup | None,
        keep_unsharded: bool,
        param_dtype: torch.dtype | None,
        keep_dtype: set[str],
        reduce_dtype: torch.dtype | None,
        wide_gradients: bool,
        keep_low_gradients: bool,
        compute_device: torch.device | None,
        pin_memory: bool,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def is_held(self) -> bool:
        """Parameters are whole by unshard(), until reshard() or the end of a forward."""
    @property
    def is_whole(self) -> bool:
        """Parameters show whole tensors."""
    @property
    def is_running(self) -> bool:
        """A forward of the module runs."""
    def leave(self) -> None:
        """The parameters are whole, of undefined values, and the unit's no more."""
    def layout(self, rank: int) -> list[tuple[str, list[int], int, int, list[int]]]:
        """(name, shape, begin, end, shape of the part [begin, end) that `rank` owns)."""
    def has_gradient_memory(self) -> bool:
        """Whether averaged gradients are there, in `.grad` or kept by somebody."""
    def averaged(self) -> list[str]:
        """Parameters that the last pass has given averages, until their hooks have run."""
    def waiting(self) -> list[str]:
        """Parameters whose `.grad` shows what no pass has averaged."""
    def zero_unused(self, zeroes: bool | None) -> None: ...
    def show_waiting(self, shows: bool) -> None: ...
    def set_sync(self, sync: bool) -> None: ...
    def reduce_by(self, hook: Callable[..., object] | None) -> None: ...
    def divide_gradients_by(self, divisor: float | None) -> None:
        """None: by the number of ranks."""

class ShardedModel:
    """All units of a model, the root first."""

    syncs: bool

    def __init__(
        self,
        units: Sequence[ParamGroup],
        *,
        forward_prefetch: bool,
        backward_prefetch: bool,
        faces: object = None,
    ) -> None: ...
    def before_forward(self, unit: ParamGroup, is_apart: bool = False) -> None: ...
    def after_forward(self, unit: ParamGroup, output: object, is_apart: bool = False) -> None: ...
    def forward_failed(self, unit: ParamGroup, what: str) -> None:
        """The other ranks are told `what`, where it was the root's."""
    def reach_from_within(self, unit: ParamGroup) -> None:
        """In a backward pass that begins at nodes within the unit, behind its outputs."""
    def report_error(self, what: str) -> None:
        """Tells the other ranks why this one does not come; without effect without gradients."""
    def backward_failed(self, what: str) -> bool:
        """The same for a backward pass that threw, if this model waits for its backward."""
    def publish(self) -> None: ...
    def finish_copies(self) -> None: ...
    def shows_larger_gradients(self) -> bool: ...
    def average_waiting(self) -> None: ...
    def unshard(self, unit: ParamGroup) -> None: ...
    def reshard(self, unit: ParamGroup) -> None: ...
    def show_copies(
        self, units: Sequence[ParamGroup], *, with_gradients: bool, here: bool
    ) -> None: ...
    def end_copies(self, units: Sequence[ParamGroup], keep: bool) -> None: ...

def broadcast_tensors(group: ProcessGroup, tensors: Sequence[Tensor], root: int) -> None:
    """Copies them from one rank to all, many in one message; an expanded one counts once."""

def keep_gradient_dtype(output: Tensor) -> None:
    """Its gradients reach the operation that made it as they were computed, whatever its dtype."""

def total_norm(
    gradients: Sequence[
        tuple[ProcessGroup | None, torch.dtype, Sequence[Tensor | None], torch.device]
    ],
    norm_type: float,
    computed_in: torch.dtype | None = None,
) -> Tensor:
    """Of all gradients; a collective of the groups, whose ranks have a part of each."""

def check_adamw_parameters(parameters: Sequence[Tensor]) -> None: ...
def make_adamw_state(parameters: Sequence[Tensor], amsgrad: bool) -> list[dict[str, Tensor]]: ...
def fused_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> int:
    """Returns the number of tensors that the kernel saw."""

class LauncherLine:
    """A worker's connection to `libddp run --in-place`; libddp/elastic/launcher_line.h."""

    @staticmethod
    def find() -> LauncherLine | None: ...
    @staticmethod
    def is_asked() -> bool: ...
    def arrive(self) -> None: ...
    def come(self, why: str) -> None: ...
    def wait(self, seconds: float) -> dict[str, Any]: ...

class SavedVersion:
    """A save that can be loaded; what it has is known when Snapshot.open has opened it."""

    @property
    def step(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def is_in_memory(self) -> bool: ...
    @property
    def world_size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def values(self) -> str:
        """JSON of this rank; that of the lowest one where the job had fewer ranks."""

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Key -> dtype and shape of the whole tensor."""

#: Key, tensor, shape of the whole one, range of elements, libddp.snapshot._pieces.StoredBy.
_SnapshotTensor = tuple[str, Tensor, Sequence[int], int, int, int]

class _Objects(Protocol):
    """libddp._objects.Objects."""

    address: str

    def list(self) -> list[str]: ...
    def read(self, name: str, offset: int, size: int) -> bytes: ...
    def create(self, name: str, content: bytes) -> None: ...
    def remove(self, names: list[str]) -> None: ...
    def writing(self, name: str, size: int) -> Any: ...

class LoadAttempts:
    """What becomes of a load whose newest save does not do; libddp/snapshot/load_attempts.h."""

    def __init__(self) -> None: ...
    def pass_over(self, reason: str, is_damaged: bool) -> bool: ...
    @property
    def has_passed_over(self) -> bool: ...
    def went_on(self, name: str) -> str: ...
    def check(self) -> None: ...

class Snapshot:
    """Saves and loads of tensors that all ranks agree on; libddp/snapshot/snapshot.h."""

    def __init__(
        self,
        *,
        group: ProcessGroup | None,
        folder: str,
        keep: int,
        replicas: int,
        run: str,
        linger: float,
        num_threads: int,
        objects: _Objects | None = None,
        helper: Sequence[str] = (),
        environment: Sequence[str] = (),
        in_memory: bool = True,
    ) -> None:
        """`folder` is the address of `objects`, where there are some; `helper` is the program that
        the keeper starts to store there, `environment` its variables (NAME=value)."""

    def save(
        self, step: int, tensors: Sequence[_SnapshotTensor], values: str, in_folder: bool
    ) -> tuple[int, int, float, bool]:
        """Returns the step, this rank's bytes, seconds, and whether it is stored."""

    def versions(self) -> list[SavedVersion]:
        """The newest first."""

    def open(self, version: SavedVersion) -> None: ...
    def read(self, version: SavedVersion, tensors: Sequence[_SnapshotTensor]) -> None: ...
    def prepare(self, tensors: Sequence[_SnapshotTensor]) -> None: ...
    @property
    def prepared_bytes(self) -> int:
        """Of memory that prepare() has begun with, until the next save."""

    def wait(self, timeout: float) -> None: ...
    def close(self) -> None: ...
    def status(self) -> str: ...

class StoredRank:
    """What a rank has stored, as an index says it."""

    @property
    def rank(self) -> int: ...
    @property
    def file(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def values(self) -> str:
        """JSON."""

class SnapshotIndex:
    @property
    def world_size(self) -> int: ...
    @property
    def ranks(self) -> list[StoredRank]: ...

class StoredSource:
    """What a rank has stored; libddp/slots/stored_file.h."""

    @property
    def pieces(self) -> list[tuple[str, str, list[int], int, int]]:
        """Key, dtype, shape of the whole tensor, range of elements; by their place in the file."""

    @property
    def data_bytes(self) -> int: ...
    def damage(self, num_threads: int) -> list[tuple[int, int, str]]:
        """Begin and end among the bytes of the data, and the tensors that lie there."""

class SnapshotStore:
    """libddp/slots/snapshot_store.h. Paths are os.fsencode's."""

    def list(self) -> list[tuple[int, int, bytes]]:
        """Step, sequence, path; the newest first."""

    def unfinished(self) -> list[tuple[int, int, str, bytes]]:
        """Step, sequence, start, path; the newest first."""

    def read(self, step: int, sequence: int, path: bytes) -> SnapshotIndex: ...
    def open(self, step: int, sequence: int, path: bytes, rank: StoredRank) -> StoredSource: ...
    def open_version(self, step: int, sequence: int, path: bytes) -> SavedVersion: ...

class SnapshotFolder(SnapshotStore):
    """libddp/slots/snapshot_folder.h."""

    def __init__(self, path: bytes) -> None: ...

class ObjectFolder(SnapshotStore):
    """libddp/slots/object_folder.h."""

    def __init__(self, objects: _Objects) -> None: ...
    def run(self) -> str:
        """The name of the job that stores there; "" where there is none."""

def read_tensors(
    version: SavedVersion, tensors: Sequence[tuple[str, Tensor]], num_threads: int
) -> None:
    """Fills whole tensors of an opened version; every byte is checked on its way."""

class KeeperClient:
    """A connection to the keeper of a run on this host, of no rank."""

    def __init__(self, run: str, timeout: float) -> None: ...
    def status(self) -> str: ...
    def store_newest(self, timeout: float) -> str:
        """JSON: step, sequence, ranks, world_size, folder."""

    def wait(self, rank: int, sequence: int, timeout: float) -> None: ...

def run_of_folder(folder: bytes) -> str: ...
def check_run_name(run: str) -> None: ...
