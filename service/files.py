"""Files that others may read at any moment: whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

UNWRITABLE: Final = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What a system call says of a file system that takes nothing new: read-only, full, or broken."""


@contextmanager
def replacing(path: str, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at the end of the block. Raises OSError.

    After a failure the old file stands as it was, and nothing of the new one is left.
    """
    scratch = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(scratch, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the mask, and whoever left a scratch file
            yield file
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
