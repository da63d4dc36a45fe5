"""Freed memory goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

_GLIBC = pytest.mark.skipif(
    "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc keeps freed memory"
)

_GIVE_BACK = """
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

_KEEP_LITTLE = """
import ctypes, sys, threading
from service.memory import keep_little
if sys.argv[1] == "little":
    keep_little()
blocks = []
threads = [threading.Thread(target=lambda: blocks.append(bytes(10_000))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del blocks
largest = bytes(10_000_000)
del largest
kept = bytes(1_000_000)
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


@_GLIBC
def test_what_the_c_library_keeps_of_freed_memory_is_given_back() -> None:
    # Blocks of the heap, with one in use above them: the threshold keeps them from being mapped.
    given = _printed(_GIVE_BACK, MALLOC_MMAP_THRESHOLD_=str(1 << 30))
    assert int(given) > 50_000_000


@_GLIBC
def test_threads_share_one_heap_and_large_blocks_stay_out_of_it() -> None:
    usual, little = _printed(_KEEP_LITTLE, "usual"), _printed(_KEEP_LITTLE, "little")
    assert usual.count("<heap ") > little.count("<heap ") == 1
    assert _mapped_blocks(little) == _mapped_blocks(usual) + 1


def _printed(program: str, *words: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**_without_settings(), **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def _without_settings() -> Mapping[str, str]:
    """This process's environment without settings of the C library."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}


def _mapped_blocks(info: str) -> int:
    """The number of blocks that malloc_info(3) counts as mapped on their own."""
    whole = info.rpartition("</heap>")[2]
    return int(whole.split('type="mmap" count="')[1].split('"')[0])
