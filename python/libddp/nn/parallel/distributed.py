"""DistributedDataParallel with torch's names, arguments and behaviour, on libddp's C++ reducer.

The class wraps once; hooks, buckets and communication run in C++. See docs/ddp.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parameter import UninitializedParameter

from libddp._load import load
from libddp.distributed._groups import native
from libddp.errors import ArgumentError, StateError
from libddp.nn.parallel import _join
from libddp.nn.parallel._comm_hooks import builtin_dtype, check_comm_hook

_C = load()
_MEBIBYTE = 1024 * 1024
_DEFAULT_CAP_MB = 25
_FIRST_BUCKET_BYTES = 1 * _MEBIBYTE


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Averages gradients over the ranks of a process group while `backward()` runs.

    All ranks start from rank 0's parameters and buffers. Parameters keep their identity, so an
    optimizer may be built before or after. Every `p.grad` is a view of a bucket that all ranks
    share, so gradients take memory once; the view stays the same from step to step, whichever way
    `zero_grad` clears it.

    Args:
        module: the model; dense parameters on the CPU.
        device_ids: accepted and ignored for a model on the CPU, so that scripts run there unedited;
            at most one entry.
        output_device, dim: accepted and ignored for a model on the CPU.
        broadcast_buffers: every rank gets rank 0's buffers before the first forward and before
            each one that follows a synchronising forward (torch's rule).
        init_sync: check that the ranks wrap the same model, and start from rank 0's values.
        process_group: a group of libddp or of torch on backend "libddp"; None = the default group.
        bucket_cap_mb: largest bucket in MiB; None = 25. The first and the last bucket are at most
            1 MiB, as long as parameters are that small.
        find_unused_parameters: parameters may stay without a gradient. There is no graph walk.
        check_reduction: deprecated in torch, without effect there and here.
        gradient_as_bucket_view: without effect: gradients are always views of their bucket.
        static_graph: the graph is the same in each iteration.

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
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group=None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list=None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        _refuse_unsupported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        if device_ids is not None and len(device_ids) > 1:
            raise ArgumentError("device_ids can only be None or contain a single element.")
        self.module = module
        self.process_group = process_group
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.device_ids = None
        self.output_device = None
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.init_sync = init_sync
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = True
        self.static_graph = static_graph
        self.bucket_bytes_cap = _bucket_bytes(bucket_cap_mb)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._comm_hooks = []
        self._gradient_dtype = None
        self._replicate(init_sync)

    def _replicate(self, init_sync: bool) -> None:
        """Builds the C++ side for the module as it is now."""
        parameters = self._tensors(self.module.named_parameters())
        for name, parameter in parameters:
            if isinstance(parameter, UninitializedParameter):
                raise ArgumentError(
                    "Modules with uninitialized parameters can't be used with "
                    f"`DistributedDataParallel`: {name!r}. Hint: run a dummy forward pass first."
                )
        self.device = parameters[0][1].device if parameters else torch.device("cpu")
        self._buffer_places = self._find_buffers() if self.broadcast_buffers else []
        self._replica = _C.Replica(
            parameters=parameters,
            buffers=self._tensors(self.module.named_buffers()),
            group=native(self.process_group),
            cap_bytes=self.bucket_bytes_cap,
            first_bytes=min(_FIRST_BUCKET_BYTES, self.bucket_bytes_cap),
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            broadcast_buffers=self.broadcast_buffers,
            init_sync=init_sync,
        )

    def _tensors(self, named) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in named if name not in self.parameters_to_ignore]

    def _find_buffers(self) -> list[tuple[dict, str]]:
        """Where the buffers stand; a forward may put another tensor there."""
        return [
            (module._buffers, key)
            for prefix, module in self.module.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and _qualified(prefix, key) not in self.parameters_to_ignore
        ]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward; its backward averages gradients."""
        replica = self._replica
        if self._join_config.enable:
            if not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)  # joined ranks mirror training only
            _join.before_forward(self)
        elif self._buffers_are_due():
            replica.broadcast(self._buffer_tensors())
        output = self.module(*inputs, **kwargs)
        # Past nn.Module.__setattr__, which looks for parameters first.
        self.__dict__["require_forward_param_sync"] = replica.after_forward(
            output, self.require_backward_grad_sync
        )
        return output

    def _buffers_are_due(self) -> bool:
        return self.require_forward_param_sync and bool(self._buffer_places)

    def _buffer_tensors(self) -> list[torch.Tensor]:
        return [buffers[key] for buffers, key in self._buffer_places]

    def _model_tensors(self) -> list[torch.Tensor]:
        parameters = self._tensors(self.module.named_parameters())
        return [tensor.detach() for _, tensor in parameters] + self._buffer_tensors()

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

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore) -> None:
        """Names that the next DistributedDataParallel over `module` leaves alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of batches.

        A rank that is done takes part in the others' collectives until all are done; then every
        rank has the model of one that trained to the end.

        Args:
            divide_by_initial_world_size: average over all ranks; False = over those with data.
            enable: False = as if it were not there.
            throw_on_early_termination: RuntimeError on every rank once the first one is done.

        Example:
            >>> with model.join():                                     # doctest: +SKIP
            ...     for x in uneven_loader:
            ...         model(x).sum().backward()
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> _join.DistributedDataParallelJoinHook:
        """For torch.distributed.algorithms.Join."""
        divide = kwargs.get("divide_by_initial_world_size", True)
        return _join.DistributedDataParallelJoinHook(self, divide)

    @property
    def join_device(self) -> torch.device:
        """For torch.distributed.algorithms.Join."""
        return self.device

    @property
    def join_process_group(self):
        """For torch.distributed.algorithms.Join."""
        return dist.group.WORLD if self.process_group is None else self.process_group

    def register_comm_hook(self, state: object, hook) -> None:
        """Lets `hook` exchange the gradients; before the first backward pass, on every rank.

        Args:
            state: passed to the hook.
            hook: `hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`,
                called once per bucket, in the same order on every rank; its future holds what
                shall stand in the bucket. It divides by the world size itself. torch's own hooks
                (torch.distributed.algorithms.ddp_comm_hooks) run unchanged.

        Raises:
            TypeError, ArgumentError: the hook does not look like one.
            StateError: a hook is registered already, or a backward pass has run.
        """
        check_comm_hook(hook)
        self._replica.register_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

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
        if self.process_group not in (None, dist.group.WORLD):
            raise StateError(
                "libddp: DistributedDataParallel can only be copied or pickled where it uses the "
                "default process group. Hint: copy or save model.module instead."
            )
        state = dict(self.__dict__)
        for name in ("process_group", "_replica", "_buffer_places"):
            del state[name]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.process_group = None
        self._replicate(init_sync=False)
        for hook, hook_state in self._comm_hooks:
            self._replica.register_comm_hook(hook_state, hook)
        if self._gradient_dtype is not None:
            self._replica.register_compress_hook(self._gradient_dtype)


def _refuse_unsupported(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise ArgumentError(
                f"libddp does not support {name} yet. Hint: docs/ddp.md lists what is supported."
            )


def _bucket_bytes(bucket_cap_mb: float | None) -> int:
    if bucket_cap_mb is None:
        return _DEFAULT_CAP_MB * _MEBIBYTE
    cap_bytes = int(bucket_cap_mb * _MEBIBYTE)
    if cap_bytes < 1:
        raise ArgumentError(
            f"libddp: bucket_cap_mb is {bucket_cap_mb}. Hint: pass a positive size in MiB."
        )
    return cap_bytes


def _qualified(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
