"""torch's internal names of DistributedDataParallel, which libraries reach for.

Whatever has a meaning here does what torch's does; the rest is accepted and says why it is without
effect. docs/ddp_compatibility.md lists all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from libddp.distributed._groups import native, torch_side
from libddp.errors import ArgumentError
from libddp.nn.parallel import _arguments, _join, _logging_data
from libddp.nn.parallel._comm_hooks import check_comm_hook
from libddp.nn.parallel._dynamo import ActiveModule, TorchsClass
from libddp.nn.parallel._reducer_handle import Reducer, Unhooked


class TorchFace:
    """Beside the documented class; needs its attributes."""

    #: Size of one message of a broadcast, in bytes; libddp chooses its own.
    broadcast_bucket_size = 250 * 1024 * 1024
    is_multi_device_module = False
    use_side_stream_for_tensor_copies = False
    _active_ddp_module = ActiveModule()

    # Parameters.

    def _trained_parameters(self) -> list[torch.Tensor]:
        """In the order of the indices in bucket plans."""
        return self._trained

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
    def device_type(self) -> str:
        """The kind of device that the model is on."""
        return self.device.type

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
        _arguments.take_over(new_process_group)
        self.process_group = torch_side(new_process_group)
        self._rebuild_replica()

    # The reducer.

    @property
    def reducer(self) -> Reducer:
        """torch's names for the reducer."""
        return Reducer(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._replica.bucket_plan() != self._first_plan

    def _check_comm_hook(self, hook) -> None:
        check_comm_hook(hook)

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

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """torch's keys, without times; see docs/ddp_compatibility.md."""
        return _logging_data.collect(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Without effect, as timings() has every pass. ArgumentError below 1, as in torch."""
        if sample_rate < 1:
            raise ArgumentError(
                "DDP runtime logging sample rate should be equal or greater than 1, and it is "
                f"{sample_rate}."
            )

    # Inputs and outputs: for scripts that call these by themselves.

    def scatter(self, inputs, kwargs, device_ids):
        """torch.nn.parallel.scatter_gather.scatter_kwargs along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs, kwargs, device_id):
        """Inputs on the model's device; `device_id` has no meaning for a CPU."""
        return _to_kwargs(inputs, kwargs, self.device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs, output_device):
        """torch.nn.parallel.scatter_gather.gather along `dim`."""
        return gather(outputs, output_device, dim=self.dim)

    # torch.compile.

    @classmethod
    def _get_active_ddp_module(cls):
        """The model whose forward runs."""
        return TorchsClass._active_ddp_module

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        outer = TorchsClass._active_ddp_module
        TorchsClass._active_ddp_module = self._stand_in or self
        try:
            yield
        finally:
            TorchsClass._active_ddp_module = outer
