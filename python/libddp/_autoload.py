"""Makes torch.distributed know the backend "libddp", without importing libddp's extension.

`register` is the entry point of group `torch.backends`: torch calls it at the end of `import torch`
in every process of an environment that has libddp, so it only writes a name into a table. The
extension is loaded when a group is created, or at once with LIBDDP_DROP_IN=1 in the environment:
then libddp takes the place of torch's process group and DDP (libddp._drop_in).
"""

from __future__ import annotations

import os

BACKEND = "libddp"
DROP_IN = "LIBDDP_DROP_IN"


def drop_in_wanted() -> bool:
    """Whether the environment asks for libddp in torch's place.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(DROP_IN, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"libddp: {DROP_IN}={value!r} is not known. Hint: set it to 1 or 0.")
    return value == "1"


def register_backend() -> None:
    """Registers the backend; does nothing where it is known already or torch has no c10d."""
    from torch import distributed

    if distributed.is_available() and not hasattr(distributed.Backend, BACKEND.upper()):
        distributed.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def register() -> None:
    """The entry point: registers the backend, and installs libddp where the user wants that."""
    register_backend()
    if drop_in_wanted():
        from libddp._drop_in import install

        install()


def _create(options, pg_options):
    """torch's creator: the backend of one group of this process."""
    from libddp.distributed._backend import create

    return create(options, pg_options)
