"""The two scheduler sysctls that koordlet writes. Pure.

Anolis kernels have both, mainline has neither. Both on at once can lock such a kernel up, so one is
turned off before the other is turned on: docs/facts/kernel.md, "Core scheduling".
"""

from __future__ import annotations

from typing import Final

GROUP_IDENTITY: Final = "kernel.sched_group_identity_enabled"
SCHED_CORE: Final = "kernel.sched_core"
OURS: Final = frozenset({GROUP_IDENTITY, SCHED_CORE})


def path_of(name: str) -> str:
    """Return the file of a dotted name."""
    return "/proc/sys/" + name.replace(".", "/")
