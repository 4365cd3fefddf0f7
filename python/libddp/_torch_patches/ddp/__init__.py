"""Makes torch.nn.parallel.DistributedDataParallel libddp's.

Replaces the name in torch.nn.parallel and in its module `distributed`, except where torch works on
the inside of its own class. What stands there then also has torch's private names (distributed.py),
which trainers and libraries reach for. torch has no way to register another class. The drop-in asks
for it; undone by uninstall, except that torch's class goes on counting libddp's as its own, for
isinstance() in modules that hold it already.
"""

from __future__ import annotations

from libddp._torch_patches import announcing
from libddp._torch_patches.replacing import Replacements

#: Modules of torch that work on the inside of torch's own DistributedDataParallel.
_KEEP_TORCHS = ("torch._dynamo.convert_frame", "torch.distributed._composable.replicate")
_KEPT = (
    "libddp: this DistributedDataParallel is torch's own, with torch's reducer, on libddp's "
    "process group: its name was imported before libddp was installed. Hint: call "
    "libddp.install() before `from torch.nn.parallel import DistributedDataParallel`, or start "
    "the script with `libddp run --drop-in`."
)


def put(replacements: Replacements) -> None:
    """The name now; what keeps torch's once it is imported."""
    import torch.nn.parallel as parallel

    from libddp._torch_patches.ddp.distributed import DistributedDataParallel
    from libddp.nn.parallel import DistributedDataParallel as Ours

    theirs = parallel.distributed.DistributedDataParallel
    theirs.register(Ours)
    for owner in (parallel, parallel.distributed):
        replacements.put(owner, "DistributedDataParallel", DistributedDataParallel)
    announcing.put(theirs, _KEPT, replacements, _KEEP_TORCHS)
    for module in _KEEP_TORCHS:
        replacements.put_after_import(
            module, lambda found: replacements.put(found, "DistributedDataParallel", theirs)
        )
