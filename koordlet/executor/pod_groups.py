"""Counts the pods' groups that come and go: each explains one reset of a QoS directory by systemd.

Whenever a pod's group is made or removed, kubelet has systemd set the CPU weight of both QoS
slices. systemd then writes all files of such a slice again, with its own values: 0 into
`memory.min` and `memory.low`, `max` into `memory.high`. It does the same to a slice that gets its
first group or loses its last one. These writes are no fight about a value: systemd does not write
again until the next group comes or goes. Facts: docs/facts/kernel.md, "What systemd writes again".
"""

from __future__ import annotations

from collections import deque
from typing import Final

from apis.qos import KubeQoS
from koordlet.executor.texts import Texts
from linux.cgroup_paths import Driver, Layout, qos_dir

_CONTROLLER: Final = "cpu"
"""The hierarchy of cgroup v1 whose groups are counted: kubelet makes a pod's group in all."""


class PodGroups:
    """See the module. window_s: how long a group that came or went counts."""

    def __init__(self, texts: Texts, *, window_s: float) -> None:
        self._texts = texts
        self._window_s = window_s
        self._groups: frozenset[str] | None = None
        self._changes: deque[tuple[float, int]] = deque()

    def count(self, now: float) -> None:
        """Note which groups have come and gone since the last call."""
        layout = self._texts.layout
        if layout.driver is not Driver.SYSTEMD or not layout.has(_CONTROLLER):
            return
        found = frozenset(
            f"{place}/{name}" for place in _qos_dirs(layout) for name in self._slices_in(place)
        )
        if self._groups is not None and found != self._groups:
            self._changes.append((now, len(found ^ self._groups)))
        self._groups = found
        while self._changes and now - self._changes[0][0] >= self._window_s:
            self._changes.popleft()

    def resets_explained(self, place: str, now: float) -> int:
        """Return how many resets in the last `window_s` seconds the pods' groups explain."""
        if place not in _qos_dirs(self._texts.layout):
            return 0
        self.count(now)
        return sum(groups for _, groups in self._changes)

    def _slices_in(self, place: str) -> list[str]:
        try:
            names = self._texts.host.listdir(self._texts.layout.directory(_CONTROLLER, place))
        except OSError:
            return []  # no pod of the class has run yet
        return [name for name in names if name.endswith(".slice")]


def _qos_dirs(layout: Layout) -> set[str]:
    """Return the places of the QoS classes; none while the pods' root is not known."""
    if not layout.kubepods:
        return set()
    return {qos_dir(layout.driver, layout.kubepods, qos) for qos in KubeQoS}
