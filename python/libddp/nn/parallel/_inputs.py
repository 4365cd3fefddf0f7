"""torch's methods that move inputs and outputs: for scripts that call these by themselves."""

from __future__ import annotations

from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs


class MovesInputs:
    """The part of DistributedDataParallel that moves inputs and outputs between devices."""

    @property
    def device_type(self) -> str:
        """The kind of device that the model is on."""
        return self.device.type

    def scatter(self, inputs, kwargs, device_ids):
        """torch.nn.parallel.scatter_gather.scatter_kwargs along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs, kwargs, device_id):
        """Inputs on the model's device, which is the one of `device_id`, or the CPU."""
        return _to_kwargs(inputs, kwargs, self.device, use_side_stream_for_tensor_copies=False)

    def gather(self, outputs, output_device):
        """torch.nn.parallel.scatter_gather.gather along `dim`."""
        return gather(outputs, output_device, dim=self.dim)
