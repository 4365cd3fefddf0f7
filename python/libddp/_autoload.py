"""Makes torch.distributed know the backend "libddp", without importing libddp's extension.

`register` is the entry point of group `torch.backends`: torch calls it at the end of `import torch`
in every process of an environment that has libddp, so it only writes a name into a table. The
extension is loaded when a group is created, or at once with LIBDDP_DROP_IN=1 in the environment:
then libddp takes the place of torch's process group and DDP (libddp._torch_patches.drop_in).
"""

from __future__ import annotations

import os

from libddp._torch_backend import register_backend

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


def register() -> None:
    """The entry point: registers the backend, and installs libddp where the user wants that."""
    register_backend(_create)
    if drop_in_wanted():
        from libddp._torch_patches.drop_in import install

        install()


def _create(options, pg_options):
    """torch's creator: the backend of one group of this process."""
    from libddp.distributed._backend import create

    return create(options, pg_options)
