"""A process group written in Python, as third parties and torch's own tests have them."""

import torch.distributed as dist


class InPlace(dist.ProcessGroup):
    """A group in Python that passes on to another one, counts, and has no name."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.calls = []

    def getBackendName(self):
        return "in-place"

    def allreduce(self, tensors, options):
        self.calls.append("allreduce")
        return self.inner.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        self.calls.append("broadcast")
        return self.inner.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        self.calls.append("allgather")
        return self.inner.allgather(outputs, inputs, options)

    def barrier(self, options):
        return self.inner.barrier(options)
