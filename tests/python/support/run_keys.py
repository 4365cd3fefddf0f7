"""A run key, by which the hosts of a run know each other."""

import os
from pathlib import Path


def key_file(folder) -> str:
    """The path of the key in that folder, which is made if it is not there."""
    path = Path(folder) / "key"
    if not path.exists():
        path.write_bytes(os.urandom(32) + b"x")  # a newline at the end would not count
        path.chmod(0o600)
    return str(path)
