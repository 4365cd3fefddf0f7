"""Makes torch.distributed know the backend "libddp", without importing libddp's extension.

`register` is the entry point of group `torch.backends`: torch calls it at the end of `import torch`
in every process of an environment that has libddp, so it only writes a name into a table. The
extension is loaded when a group is created.
"""

from __future__ import annotations

BACKEND = "libddp"


def register() -> None:
    """Registers the backend; does nothing where it is known already or torch has no c10d."""
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, BACKEND.upper()):
        distributed.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options, pg_options):
    """torch's creator: the backend of one group of this process."""
    from libddp.distributed._backend import create

    return create(options, pg_options)
