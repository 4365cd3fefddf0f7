"""The class that the drop-in puts in torch's place: libddp's, with torch's private names.

Libraries and trainers reach for these. Whatever has a meaning here does what torch's does; the rest
is accepted and says why it is without effect. docs/ddp_compatibility.md lists all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from libddp._torch_patches import dynamo
from libddp._torch_patches.ddp import logging_data
from libddp._torch_patches.ddp.reducer import Reducer, Unhooked
from libddp.distributed._foreign_groups import take_over
from libddp.distributed._groups import native, torch_side
from libddp.errors import ArgumentError, Error
from libddp.nn.parallel import _join
from libddp.nn.parallel import distributed as _ours
from libddp.nn.parallel._comm_hooks import check_comm_hook

_TorchsClass = dynamo.TorchsClass
dynamo.keep_out("libddp._torch_patches.ddp")


class _ActiveModule:
    """`_active_ddp_module` of the class and of its objects: the model whose forward runs, if any.

    Dynamo reads torch's class, so the value lives there.
    """

    def __get__(self, instance, owner):
        return _TorchsClass._active_ddp_module


class _BehindDistributedDataParallel(_ours.DistributedDataParallel):
    """What `super(DistributedDataParallel, self)` of a subclass leads to.

    Behind torch's class it is nn.Module: mmengine's MMSeparateDistributedDataParallel makes itself
    one that way, and wraps the parts of a model one by one.
    """

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class DistributedDataParallel(_BehindDistributedDataParallel):
    """libddp.nn.parallel.DistributedDataParallel, whose documentation holds here too."""

    @wraps(_ours.DistributedDataParallel.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _ours.DistributedDataParallel.__init__(self, *args, **kwargs)

    #: Size of one message of a broadcast, in bytes; libddp chooses its own.
    broadcast_bucket_size = 250 * 1024 * 1024
    is_multi_device_module = False
    use_side_stream_for_tensor_copies = False
    _active_ddp_module = _ActiveModule()
    _ddp_sink_clone = True
    # For logging_data.
    _num_synchronised = 0
    _has_joined = False
    _builtin_hook = None
    _last_error: str | None = None

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """isinstance() is true of libddp's own class too, in modules that know only this name."""
        if cls is DistributedDataParallel and _ours.DistributedDataParallel in other.__mro__:
            return True
        return NotImplemented

    # Parameters.

    @staticmethod
    def _get_data_parallel_params(module: torch.nn.Module, named_params: bool = False) -> Iterator:
        """The parameters (with names, if wanted) that are not ignored."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore) -> None:
        """Names that the next DistributedDataParallel over `module` leaves alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for named in (module.named_parameters(), module.named_buffers()):
            for name, tensor in named:
                if name in params_and_buffers_to_ignore:
                    tensor._ddp_ignored = True

    # The group.

    @property
    def _distributed_rank(self) -> int:
        return native(self.process_group).rank()

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest `input_rank` of the ranks where `rank_cond` holds; a collective."""
        found = _join.highest(self, input_rank if rank_cond else -1)
        if found == -1:
            raise ArgumentError("libddp: _find_common_rank: rank_cond is false on every rank.")
        return found

    def _update_process_group(self, new_process_group) -> None:
        """From now on gradients are averaged over another group, such as that of the survivors.

        Called by every rank of the new group; nothing is sent. Hooks that hold a group of their
        own (the state of register_comm_hook) keep it. A rank that is not in it stays as it is.
        """
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        take_over(new_process_group, "DistributedDataParallel")
        self.process_group = torch_side(new_process_group)
        self._rebuild_replica()

    # Buffers.

    def _distributed_broadcast_coalesced(
        self, tensors: Iterable[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """All ranks take these tensors' values of one rank; messages have a size of their own."""
        self._replica.broadcast(list(tensors), authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs=None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """As _distributed_broadcast_coalesced; of the buffers where no tensors are given."""
        tensors = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(tensors, bucket_size or 0, authoritative_rank)

    # The reducer.

    @property
    def reducer(self) -> Reducer:
        """torch's names for the reducer."""
        return Reducer(self)

    def _replicate(self, init_sync: bool, init_sync_buffers: bool = False) -> None:
        super()._replicate(init_sync, init_sync_buffers)
        self._first_plan = self._replica.bucket_plan()

    def _join_group(self) -> None:
        if isinstance(self._replica, Unhooked):
            self._replicate(self.init_sync, self._init_sync_buffers)
            self._remove_autograd_hooks()
            return
        super()._join_group()
        self._first_plan = self._replica.bucket_plan()

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._replica.bucket_plan() != self._first_plan

    def _check_comm_hook(self, hook) -> None:
        check_comm_hook(hook)

    def _check_reducer_finalized(self) -> None:
        """Raises StateError where a backward pass has not averaged its gradients."""
        self._replica.check_finished()

    def _remove_autograd_hooks(self) -> None:
        """From now on backward passes leave the gradients of this rank as they are."""
        if not isinstance(self._replica, Unhooked):
            self._replica = Unhooked(self._replica, native(self.process_group))

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Without effect: outputs are handed out as they are, there is no sink to clone them."""
        self._ddp_sink_clone = val

    def _set_sparse_metadata(self, global_unique_ids) -> None:
        """Without effect: a hint for torch's sparse all-reduce, which libddp does not need."""

    # Logging.

    def register_comm_hook(self, state: object, hook) -> None:
        with logging_data.noted(self):
            super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type) -> None:
        with logging_data.noted(self):
            super()._register_builtin_comm_hook(comm_hook_type)
        self._builtin_hook = comm_hook_type

    def join_hook(self, **kwargs: Any) -> _join.DistributedDataParallelJoinHook:
        hook = super().join_hook(**kwargs)
        self._has_joined = True
        return hook

    def _after_forward(self, output: Any) -> bool:
        try:
            synchronises = super()._after_forward(output)
        except Error as error:
            logging_data.note(self, error)
            raise
        # Past nn.Module.__setattr__, which looks for parameters first.
        self.__dict__["_num_synchronised"] = self._num_synchronised + synchronises
        return synchronises

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """torch's keys, without times; see docs/ddp_compatibility.md."""
        return logging_data.collect(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Without effect, as timings() has every pass. ArgumentError below 1, as in torch."""
        if sample_rate < 1:
            raise ArgumentError(
                "DDP runtime logging sample rate should be equal or greater than 1, and it is "
                f"{sample_rate}."
            )

    # torch.compile.

    @classmethod
    def _get_active_ddp_module(cls):
        """The model whose forward runs."""
        return _TorchsClass._active_ddp_module

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        outer = _TorchsClass._active_ddp_module
        _TorchsClass._active_ddp_module = self._stand_in or self
        try:
            yield
        finally:
            _TorchsClass._active_ddp_module = outer
