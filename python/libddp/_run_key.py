"""The run key of `libddp run`: made for one host, or taken from a file on several.

    _run_key.hand_out(args)      # before the workers start; they find it through their environment

The environment names a place, never the key: a file of the user's, or a memory file of this process
that its children open as /proc/<pid>/fd/<n>. The kernel lets only this user do that, nothing else
inherits it, and it is gone when this process ends. docs/security.md says what the key is good for.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat

FILE = "LIBDDP_RUN_KEY_FILE"
DESCRIPTOR = "LIBDDP_RUN_KEY_FD"
# Twice what the library asks for: it drops line ends from the end of a key, and one random key in
# 128 ends with such a byte.
KEY_BYTES = 64


def hand_out(args) -> None:
    """Tells the workers where the key is; makes one for a job on one host if none was given.

    Raises:
        ArgumentError: the file of --run-key-file cannot be a key.
    """
    if args.run_key_file:
        check_file(args.run_key_file)
        os.environ[FILE] = os.path.abspath(args.run_key_file)
        os.environ.pop(DESCRIPTOR, None)
    elif DESCRIPTOR in os.environ:
        # The workers do not inherit this process's descriptors.
        os.environ[FILE] = path_of(int(os.environ.pop(DESCRIPTOR)))
    elif FILE not in os.environ and args.nnodes in ("1", "1:1") and has_libcrypto():
        os.environ[FILE] = path_of(make())


def check_file(path: str) -> None:
    """The rules that the library has, so that a wrong file is told before any worker starts.

    Raises:
        ArgumentError: no file, of another user, or open to others.
    """
    from libddp.errors import ArgumentError

    def refuse(problem: str, hint: str):
        raise ArgumentError(f"libddp run: --run-key-file={path}: {problem}. Hint: {hint}.")

    try:
        facts = os.stat(path)
    except OSError as error:
        refuse(error.strerror, "make one with 'umask 077; openssl rand -hex 32 > FILE'")
    if facts.st_uid != os.geteuid():
        refuse(f"it belongs to user {facts.st_uid}", "make a copy that belongs to you")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        refuse(
            f"its mode is {stat.S_IMODE(facts.st_mode):04o}, so others can use it",
            "chmod 600, and make a new key if others may have read it",
        )


def make() -> int:
    """A memory file with a random key, which never was in this process's own memory."""
    key = os.memfd_create("libddp-run-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(key, 0o600)
    os.ftruncate(key, KEY_BYTES)
    with mmap.mmap(key, KEY_BYTES) as page, open("/dev/urandom", "rb", buffering=0) as random:
        # Memory files do not end up in core dumps: the mapping is gone before anything can fail.
        if random.readinto(page) != KEY_BYTES:
            raise OSError("libddp run: no random bytes from /dev/urandom")
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(key, fcntl.F_ADD_SEALS, seals)
    return key


def path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def has_libcrypto() -> bool:
    """Whether the library will find what checks a key; without it nothing is made unasked."""
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        try:
            ctypes.CDLL(name)
            return True
        except OSError:
            continue
    return False
