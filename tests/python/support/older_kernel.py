"""Runs a program as on Linux before 5.3, which tells nobody of the end of another's process.

    python older_kernel.py COMMAND...       # as gVisor and strict containers do, too

A seccomp filter: pidfd_open, pidfd_send_signal and clone3 are not implemented, SO_PEERPIDFD is no
option, MADV_POPULATE_* no advice. On x86-64 only.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

IS_POSSIBLE = platform.machine() == "x86_64"
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_GETSOCKOPT, _MADVISE = 55, 28
#: pidfd_send_signal, pidfd_open, clone3, pidfd_getfd.
_NOT_IMPLEMENTED = (424, 434, 435, 438)
#: System call, number of an argument, its value, error.
_REFUSED = (
    (_GETSOCKOPT, 2, 77, errno.ENOPROTOOPT),
    (_MADVISE, 2, 22, errno.EINVAL),
    (_MADVISE, 2, 23, errno.EINVAL),
)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def _do(code: int, value: int, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, otherwise, value)


def _program() -> bytes:
    """Of the classic BPF machine; a jump that is not equal passes over so many instructions."""
    steps = []
    for number in _NOT_IMPLEMENTED:
        steps += [_do(_LOAD, 0), _do(_EQUAL, number, 1), _do(_RETURN, _FAIL | errno.ENOSYS)]
    for number, argument, value, error in _REFUSED:
        steps += [_do(_LOAD, 0), _do(_EQUAL, number, 3), _do(_LOAD, 16 + 8 * argument)]
        steps += [_do(_EQUAL, value, 1), _do(_RETURN, _FAIL | error)]
    return b"".join([*steps, _do(_RETURN, _ALLOW)])


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def main() -> None:
    steps = _program()
    held = _Filter(len(steps) // 8, steps)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(held), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
