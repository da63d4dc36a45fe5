"""The order of the pods of a gang."""

from __future__ import annotations

import re
from typing import Final

from cluster.scheduler.tables.gather import index_of
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

_NUMBERS: Final = re.compile(r"(\d+)")


def place_in_gang(pod: PendingPod[PodShape]) -> tuple[int, list[tuple[int, int, str]], str]:
    """Return what sorts the pods of a gang: index, then name, with numbers by their value."""
    parts = [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in _NUMBERS.split(pod.key)
        if part
    ]
    return index_of(pod.shape), parts, pod.uid
