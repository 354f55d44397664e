"""The C library's treatment of host memory that is freed."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (man 3 mallopt)."""


def keep_freed_memory() -> bool:
    """Makes the C library keep what is freed for what is allocated next; False where it is not glibc.

    A program on CPUs asks for its temporary memory anew in each step. glibc gives arrays of that size back to
    the system at once, and the system fills each page with zeros when it is touched again: a sixth of the
    time of a small step (docs/decisions/host_memory.md). Arrays over 64 MiB that another thread than the main
    one allocates are given back all the same: so programs of one CPU device run in the thread that calls them
    (startup.py). Later allocations in the process are treated alike.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    most = 2**30
    kept = [libc.mallopt(option, most) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)]
    return all(kept)
