"""The run key of `libddp run`: made for one host, or taken from a file on several.

    _run_key.hand_out(args)      # before the workers start; they find it through their environment

The environment names a place, never the key: a file of the user's, or a memory file of this process
that its children open as /proc/<pid>/fd/<n>. The kernel lets only this user do that, and it is gone
when this process ends. The workers inherit it too, under the same number: in a container with
process ids of its own the path means nothing. The library closes that descriptor when it has read
the key. docs/security.md says what the key is good for.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import stat

FILE = "LIBDDP_RUN_KEY_FILE"
DESCRIPTOR = "LIBDDP_RUN_KEY_FD"
# Twice what the library asks for: it drops line ends from the end of a key, and one random key in
# 128 ends with such a byte.
KEY_BYTES = 64
# What the library reads at most, and one byte more: a longer key shows.
MAX_BYTES = 2049
# For the end of a pipe; its bytes are there when this process starts.
PIPE_SECONDS = 5


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
        pass_on(copy(os.environ.pop(DESCRIPTOR)))
    elif FILE not in os.environ and args.nnodes in ("1", "1:1") and has_libcrypto():
        pass_on(make())


def has_key() -> bool:
    """Whether the environment names a key, for this process and its workers."""
    return FILE in os.environ or DESCRIPTOR in os.environ


def check_file(path: str) -> None:
    """The rules that the library has, so that a wrong file is told before any worker starts.

    Raises:
        ArgumentError: no file, of another user, or open to others.
    """
    source = f"--run-key-file={path}"
    try:
        facts = os.stat(path)
    except OSError as error:
        hint = "make one with 'umask 077; openssl rand -hex 32 > FILE'"
        raise refusal(source, error.strerror, hint) from None
    mode = stat.S_IMODE(facts.st_mode)
    is_own = facts.st_uid == os.geteuid()
    if not is_own and facts.st_uid != 0:
        hint = "make a copy that belongs to you, or to root with mode 0640"
        raise refusal(source, f"it belongs to user {facts.st_uid}", hint)
    # Root's file may be read by its group, as secrets are mounted into containers.
    if mode & 0o077 and (facts.st_uid != 0 or mode & 0o037):
        hint = "chmod 600, and make a new key if others may have read it"
        if facts.st_uid == 0:
            hint = (
                "root's file may be read by its group, and used by nobody else: mode 0640 or less "
                "(Kubernetes: defaultMode 0440 and an fsGroup)"
            )
        raise refusal(source, f"its mode is {mode:04o}, so others can use it", hint)


def refusal(source: str, problem: str, hint: str) -> Exception:
    from libddp.errors import ArgumentError

    return ArgumentError(f"libddp run: {source}: {problem}. Hint: {hint}.")


def make() -> int:
    """A memory file with a random key, which never was in this process's own memory."""
    with open("/dev/urandom", "rb", buffering=0) as random:
        key, size = memory_file(random, KEY_BYTES)
    if size != KEY_BYTES:
        raise OSError("libddp run: no random bytes from /dev/urandom")
    return key


def copy(number: str) -> int:
    """A memory file with what a descriptor holds: every worker reads it, a pipe could be read once.

    Raises:
        ArgumentError: no descriptor, or nothing that ends.
    """
    source = f"{DESCRIPTOR}={number}"
    hint = "whoever starts libddp run must pass the descriptor on, or use --run-key-file"
    try:
        descriptor = os.open(f"/proc/self/fd/{int(number)}", os.O_RDONLY | os.O_CLOEXEC)
        os.set_inheritable(int(number), False)
    except (OSError, ValueError) as error:
        raise refusal(source, str(error), hint) from None
    with open(descriptor, "rb", buffering=0) as given:
        try:
            key, size = memory_file(given, MAX_BYTES)
        except TimeoutError:
            problem = "its other end is neither closed nor written to"
            hint = "whoever writes the key must close the pipe after it"
            raise refusal(source, problem, hint) from None
        except OSError as error:
            raise refusal(source, str(error), "it must be open for reading") from None
    if not 32 <= size < MAX_BYTES:
        shown = size if size < MAX_BYTES else "more"
        hint = "make one with 'openssl rand -hex 32'"
        raise refusal(source, f"it has {shown} bytes, a key has 32 to {MAX_BYTES - 1}", hint)
    return key


def memory_file(source, limit: int) -> tuple[int, int]:
    """A sealed memory file with the first bytes of `source`, and how many there are."""
    key = os.memfd_create("libddp-run-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(key, 0o600)
    os.ftruncate(key, limit)
    size = 0
    # Memory files do not end up in core dumps: the mapping is gone before anything can fail.
    with mmap.mmap(key, limit) as page, memoryview(page) as view:
        while size < limit:
            if not select.select([source], [], [], PIPE_SECONDS)[0]:
                raise TimeoutError
            with view[size:] as rest:
                got = source.readinto(rest)
            if not got:
                break
            size += got
    os.ftruncate(key, size)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(key, fcntl.F_ADD_SEALS, seals)
    return key, size


def pass_on(key: int) -> None:
    """Lets the workers find the key by its path, and inherit it."""
    from libddp._torch_patches import workers_descriptors

    os.environ[FILE] = path_of(key)
    workers_descriptors.put(key)


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
