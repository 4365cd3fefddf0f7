"""Network namespaces as a process enters them; `ip netns add` makes them. Needs root.

enter("host0")                        # this process, as `ip netns exec host0` does it
enter_network("host0")                # this thread alone, and only for new sockets and devices
read("host0", "net/tcp")              # /proc/net/tcp as it is there
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_BIND, MS_REC, MS_SLAVE = 0x1, 0x1000, 0x4000, 0x80000
MNT_DETACH = 2


def call(function: str, *arguments) -> None:
    """A system call of libc."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int) -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)


def enter_network(name: str) -> None:
    with open(f"/run/netns/{name}", "rb") as handle:
        call("setns", handle.fileno(), CLONE_NEWNET)


def enter(name: str) -> None:
    """With a /sys that shows the namespace's devices, and its own files of /etc."""
    enter_network(name)
    call("unshare", CLONE_NEWNS)
    mount("", "/", "none", MS_SLAVE | MS_REC)
    read_only = 0
    try:
        call("umount2", b"/sys", MNT_DETACH)
    except OSError:  # a read-only one cannot be covered by one that is not
        read_only = MS_RDONLY if os.statvfs("/sys").f_flag & os.ST_RDONLY else 0
    mount(name, "/sys", "sysfs", read_only)
    own = Path("/etc/netns") / name
    for file in own.iterdir() if own.is_dir() else ():
        mount(str(file), f"/etc/{file.name}", "none", MS_BIND)


def read(name: str | None, table: str) -> str:
    """A file of /proc in a namespace; None: in this process's own."""
    texts = []

    def visit():
        if name is not None:
            enter_network(name)
        texts.append(Path("/proc/thread-self", table).read_text())

    visitor = threading.Thread(target=visit)
    visitor.start()
    visitor.join()
    if not texts:
        raise OSError(f"cannot read {table} in {name}")
    return texts[0]
