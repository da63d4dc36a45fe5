"""The two switches of the scheduler in /proc/sys that are ours to write. Pure.

Alibaba's kernels have both, others neither. Both on at once can lock such a kernel up, so whoever
turns one on turns the other off before. Source: linux-interfaces.md sections 8 and 13.
"""

from __future__ import annotations

from typing import Final

GROUP_IDENTITY: Final = "kernel.sched_group_identity_enabled"
SCHED_CORE: Final = "kernel.sched_core"
OURS: Final = frozenset({GROUP_IDENTITY, SCHED_CORE})


def path_of(name: str) -> str:
    """Return the file of a dotted name."""
    return "/proc/sys/" + name.replace(".", "/")
