"""DistributedDataParallel with torch's names, arguments and behaviour, on libddp's C++ reducer.

The class wraps once; hooks, buckets and communication run in C++. See docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _cast_forward_inputs

from libddp._load import load
from libddp._torch_patches import dynamo, split_backward
from libddp.distributed._exit import describe
from libddp.distributed._groups import native
from libddp.errors import StateError
from libddp.nn.parallel import _arguments, _backward_errors, _join, _options
from libddp.nn.parallel._buffers import SynchronisesBuffers
from libddp.nn.parallel._comm_hooks import CommHook, builtin_dtype, check_comm_hook
from libddp.nn.parallel._diagnosis import Diagnoses
from libddp.nn.parallel._finalize import FinishesByHand
from libddp.nn.parallel._inputs import MovesInputs
from libddp.nn.parallel._optimizers import StepsInBackward
from libddp.nn.parallel._rejoin import RejoinsGroups

_C = load()
_TorchsClass = dynamo.TorchsClass
dynamo.keep_out("libddp.nn.parallel")
#: Attributes that a copy builds anew.
_NOT_PICKLED = (
    "process_group",
    "_replica",
    "_module_parameters",
    "_trained",
    "_buffer_homes",
    "_buffer_futures",
    "_stepped",
)


def _objection(module: torch.nn.Module) -> str | None:
    """See split_backward."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) and part.process_group.size() > 1:
            return (
                "is in DistributedDataParallel, so its gradients are averaged in whole passes only"
            )
    return None


class DistributedDataParallel(
    MovesInputs,
    SynchronisesBuffers,
    StepsInBackward,
    FinishesByHand,
    RejoinsGroups,
    Diagnoses,
    torch.nn.Module,
    _join.TakesUnevenInputs,
):
    """Averages gradients over the ranks of a process group while `backward()` runs.

    All ranks start from rank 0's parameters and buffers. Parameters keep their identity, so an
    optimizer may be built before or after. Every `p.grad` is a view of a bucket that all ranks
    share, so gradients take memory once; the view stays the same from step to step, whichever way
    `zero_grad` clears it (see gradient_as_bucket_view).

    Args:
        module: the model; dense parameters, all on the CPU or all on one device.
        device_ids, output_device: a device (index, name, torch.device), a list with one, or None.
            With `device_ids` forward() brings its inputs to that device, which must be the model's.
            Without effect for a model on the CPU, so that scripts run there unedited.
        dim: for `scatter` and `gather`.
        broadcast_buffers: torch's former name of `forward_sync_buffers`; False also leaves buffers
            alone at construction.
        init_sync: check that the ranks wrap the same model, and start from rank 0's values.
        process_group: a group of libddp or of torch on any backend for CPU tensors, also one of a
            class of its own; None = the default group.
        bucket_cap_mb: largest bucket in MiB; None = 25. The first and the last bucket are at most
            1 MiB, as long as parameters are that small.
        find_unused_parameters: parameters may stay without a gradient. There is no graph walk.
        check_reduction: deprecated in torch, without effect there and here.
        gradient_as_bucket_view: False (torch's default): each `p.grad` is a tensor of its own, and
            gradients take memory twice. True: it is a view of its bucket. None: too, with the
            values of False: one that the script has given stays that tensor and gets the average,
            and one that a pass reaches on no rank leaves its bucket and stays what it was. With
            True the one is replaced, and the other is the average of what the ranks have, or what
            a communication hook makes of it. A lone rank's gradients on a device are tensors of
            their own always.
        static_graph: the graph is the same in each iteration.
        delay_all_reduce_named_params: (name, parameter) pairs that are averaged only in backward
            passes in which `param_to_hook_all_reduce` gets a gradient, at their end; until then
            their gradients add up on each rank.
        param_to_hook_all_reduce: a parameter; goes with the argument before.
        mixed_precision: torch's `_MixedPrecision`: parameters, inputs and gradients compute in
            `param_dtype` (float16, bfloat16) in forward and backward and are float32 outside; the
            average is taken in `reduce_dtype` (None = param_dtype); floating-point buffers become
            `buffer_dtype`.
        device_mesh: a DeviceMesh of one dimension, in place of `process_group`. For a slice of a
            larger mesh the module's DTensor parameters become local ones, as in torch.
        skip_all_reduce_unused_params: buckets without a used parameter are not sent; all ranks must
            leave the same parameters unused.
        bucket_cap_mb_list: the limits of the first, second, ... bucket in MiB; the last entry holds
            for the rest.
        batched_grad_copy: without effect: each gradient is copied once, as it comes.
        forward_sync_buffers: every rank gets rank 0's buffers before the first forward and before
            each one that follows a synchronising forward (torch's rule); None = True.
        lazy_bucket_allocation: without effect: the buckets are the only memory of the gradients.

    Raises:
        ArgumentError: (a ValueError and a RuntimeError) no parameter requires a gradient; an
            argument that libddp does not support yet; the ranks wrap different models.
        StateError: (a RuntimeError) there is no default group.

    Note:
        Construction is a collective of all ranks. So is `backward()` after a forward with
        gradients on and `require_backward_grad_sync` set, and a forward that broadcasts buffers.

    Example:
        >>> model = DistributedDataParallel(net)                       # doctest: +SKIP
        >>> model(x).sum().backward()                                  # doctest: +SKIP
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids=None,
        output_device=None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group=None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list=None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _arguments.check_devices(device_ids, output_device)
        self.process_group = _arguments.group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self._is_sliced = _arguments.localize_sliced_parameters(module, device_mesh)
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delayed = _options.delayed_parameters(
            delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        # In a tuple, as a module takes a parameter for one of its own.
        self._delayed_until = (param_to_hook_all_reduce,)
        self.parameters_to_ignore.update(name for name, _ in self._delayed)
        self.device_ids, self.output_device = _arguments.devices_of(
            module, device_ids, output_device
        )
        self.dim = dim
        self.forward_sync_buffers, init_sync_buffers = _arguments.buffer_rules(
            broadcast_buffers, forward_sync_buffers
        )
        self.init_sync = init_sync
        self.find_unused_parameters = find_unused_parameters
        self._asked_bucket_view = gradient_as_bucket_view
        is_view = gradient_as_bucket_view is None or gradient_as_bucket_view
        self.gradient_as_bucket_view = bool(is_view)
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.static_graph = static_graph
        self.bucket_bytes_cap_list = _options.bucket_bytes_list(bucket_cap_mb_list)
        self.bucket_bytes_cap = _options.largest_bucket(bucket_cap_mb, self.bucket_bytes_cap_list)
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self._stand_in = dynamo.stand_in(self.bucket_bytes_cap)
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self._require_manual_backward_finalization = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._syncs_before = True
        self._comm_hooks = []
        self._gradient_dtype = None
        self._init_sync_buffers = init_sync_buffers
        self._options_of_construction = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "broadcast_buffers": self.forward_sync_buffers,
        }
        self._replicate(init_sync, init_sync_buffers)

    def _replicate(self, init_sync: bool, init_sync_buffers: bool = False) -> None:
        """Builds the C++ side for the module as it is now."""
        self._is_sharded = False  # by AdamW(shard_over=self)
        parameters = self._tensors(self.module.named_parameters())
        _arguments.check_module(self.module, parameters)
        self._module_parameters = [parameter for _, parameter in parameters]
        self._trained = [p for p in self._module_parameters if p.requires_grad]
        self.device = parameters[0][1].device if parameters else torch.device("cpu")
        self._buffer_futures = []
        self._lazy_init_ran = False
        self._assign_modules_buffers()
        self._replica = _C.ReplicatedModel(
            parameters=parameters,
            buffers=list(self._named_buffers()),
            group=native(self.process_group),
            options=_options.native_options(self, parameters, init_sync, init_sync_buffers),
            delayed=self._delayed,
            delayed_until=self._delayed_until[0],
        )
        if self._require_manual_backward_finalization:
            self._replica.set_manual_finish(True)
        _backward_errors.watch(self)
        split_backward.put(_objection)

    def _rebuild_replica(self) -> None:
        """The C++ side anew, without a word to other ranks."""
        self._replica = None  # its hooks go before new ones come
        self._replicate(init_sync=False)
        for hook in self._comm_hooks:
            self._replica.register_comm_hook(None, hook)
        if self._gradient_dtype is not None:
            self._replica.register_compress_hook(self._gradient_dtype)

    def _tensors(self, named) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in named if name not in self.parameters_to_ignore]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward; its backward averages gradients."""
        if _profiler_enabled():
            with record_function("DistributedDataParallel.forward"):
                return self._run(inputs, kwargs)
        return self._run(inputs, kwargs)

    def _run(self, inputs: tuple, kwargs: dict) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        # torch.compile asks whose forward runs; a context manager would cost a microsecond.
        outer = _TorchsClass._active_ddp_module
        _TorchsClass._active_ddp_module = self._stand_in or self
        try:
            output = self._modules["module"](*inputs, **kwargs)
        except BaseException as error:
            self._replica.forward_failed(describe(error), self.require_backward_grad_sync)
            raise
        finally:
            _TorchsClass._active_ddp_module = outer
        return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple, dict]:
        """What is due before the module's forward; returns what it gets."""
        if not self._lazy_init_ran:
            self._lazy_init()
        if self._buffer_futures:  # of a forward that no backward followed
            self._wait_for_buffers()
        if self._join_config.enable:
            if torch.is_grad_enabled():  # joined ranks mirror training only
                _join.before_forward(self)
        elif self._syncs_before and self.will_sync_module_buffers():
            self._sync_buffers()
        if self.device_ids is not None:
            # One entry for each device.
            (inputs,), (kwargs,) = self.to_kwargs(inputs, kwargs, self.device_ids[0])
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(
                self.mixed_precision.param_dtype, *inputs, **kwargs
            )
        self._replica.before_forward()
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        """What is due after the module's forward; returns what forward() returns."""
        if self._join_config.enable and not torch.is_grad_enabled():
            self._replica.after_forward(output, False)
            return output
        if not self._syncs_before and self.will_sync_module_buffers():
            self._sync_buffers()
        if self._buffer_futures:
            self._wait_for_buffers_later(output)
        # Past nn.Module.__setattr__, which looks for parameters first.
        self.__dict__["require_forward_param_sync"] = self._after_forward(output)
        return output

    def _after_forward(self, output: Any) -> bool:
        """Whether the backward pass of this forward averages gradients."""
        return self._replica.after_forward(output, self.require_backward_grad_sync)

    def _lazy_init(self) -> None:
        """Before the first forward: takes over optimizers that are to run in the backward pass."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    def _model_tensors(self) -> list[torch.Tensor]:
        buffers = self.modules_buffers if self.forward_sync_buffers else []
        parameters = self._module_parameters + [parameter for _, parameter in self._delayed]
        return [parameter.detach() for parameter in parameters] + buffers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside accumulate gradients locally; the next one outside averages the sum.

        Example:
            >>> with model.no_sync():                                  # doctest: +SKIP
            ...     model(first).sum().backward()
            >>> model(second).sum().backward()                         # doctest: +SKIP
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _set_static_graph(self) -> None:
        """As `static_graph=True`; before the first backward pass."""
        self._replica.set_static_graph()
        self.static_graph = True

    def register_comm_hook(self, state: object, hook) -> None:
        """Lets `hook` exchange the gradients; before the first backward pass, on every rank.

        Args:
            state: passed to the hook.
            hook: `hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`,
                called once per bucket, in the same order on every rank, with the buckets that
                torch makes; its future holds what shall stand in the bucket. It divides by the
                world size itself. torch's own hooks
                (torch.distributed.algorithms.ddp_comm_hooks) run unchanged.

        Raises:
            TypeError, ArgumentError: the hook does not look like one.
            StateError: a hook is registered already, or a backward pass has run.
        """
        check_comm_hook(hook)
        registered = CommHook(hook, state)
        self._replica.register_comm_hook(None, registered)
        self._comm_hooks.append(registered)

    def _register_builtin_comm_hook(self, comm_hook_type) -> None:
        """One of torch's built-in hooks: ALLREDUCE or FP16_COMPRESS, in C++."""
        dtype = builtin_dtype(comm_hook_type)
        if dtype is not None:
            self.compress_gradients(dtype)

    def compress_gradients(self, dtype: torch.dtype) -> None:
        """Averages gradients in `dtype` (float16 or bfloat16): half the bytes, one rounding.

        In C++, without Python on the way; otherwise as `register_comm_hook`.
        """
        self._replica.register_compress_hook(dtype)
        self._gradient_dtype = dtype

    def __getstate__(self) -> dict:
        if self.process_group is not dist.group.WORLD:
            raise StateError(
                "libddp: DistributedDataParallel can only be copied or pickled where it uses the "
                "default process group. Hint: copy or save model.module instead."
            )
        state = dict(self.__dict__)
        for name in _NOT_PICKLED:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.process_group = _arguments.group_of(None, None)
        self._rebuild_replica()
