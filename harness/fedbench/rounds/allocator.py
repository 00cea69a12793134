"""What the C library does with memory that a training step frees and the next one asks for again."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt."""


@lru_cache(maxsize=1)
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "gnu_get_libc_version") else None


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory a thread, where it would hand every large tensor's back at once.

    The next step would else fault it in anew, page by page. A round of fedavg-cnn in two threads takes 0.86 of the
    time, one of creff on convnet 0.95 (medians of interleaved runs). Does nothing where there is no glibc.
    """
    library = _glibc()
    if library is None:
        return
    library.mallopt(_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
    library.mallopt(_TRIM_THRESHOLD, 64 * 2**20)
    library.mallopt(_TOP_PAD, 16 * 2**20)


def return_freed_memory() -> None:
    """Hand back what is free between the tensors that live on, where there is glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
