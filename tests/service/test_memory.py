"""Freed memory goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
from service.memory import give_back
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
blocks = [bytes(100_000) for _ in range(1000)]
last = bytes(100_000)
del blocks
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(
    "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc keeps freed memory"
)
def test_what_the_c_library_keeps_of_freed_memory_is_given_back() -> None:
    # Blocks of the heap, with one in use above them: the threshold keeps them from being mapped.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
    program = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(program.stdout) > 50_000_000
