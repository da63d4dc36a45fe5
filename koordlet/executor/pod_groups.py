"""Counts the pods' groups that come and go: each explains one reset of a QoS directory by systemd.

Whenever a pod's group is made or removed, kubelet has systemd set the CPU weight of both QoS
slices, Burstable and BestEffort. systemd then writes all files of such a slice again, with its own
values: 0 into `memory.min` and `memory.low`, `max` into `memory.high`. It does the same once more
to a slice that gets its first group or loses its last one. These writes are not a fight about a
value: systemd does not write again until the next group comes or goes. Facts:
docs/facts/kernel.md, "What systemd writes again".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from apis.qos import KubeQoS
from koordlet.executor.texts import Texts
from linux.cgroup_paths import Driver, qos_dir

_CONTROLLER: Final = "cpu"
"""The hierarchy of cgroup v1 whose groups are counted: kubelet makes a pod's group in all."""


@dataclass(frozen=True, slots=True)
class _Change:
    """What one call of `count` found. turned: classes that got their first or lost their last
    group."""

    at: float
    groups: int
    turned: frozenset[KubeQoS]


class PodGroups:
    """See the module. window_s: how long a group that came or went counts."""

    def __init__(self, texts: Texts, *, window_s: float) -> None:
        self._texts = texts
        self._window_s = window_s
        self._root = ""
        self._groups: Mapping[KubeQoS, frozenset[str]] = {}
        """Of each class, as `count` found them last in `_root`."""
        self._changes: deque[_Change] = deque()

    def count(self, now: float) -> None:
        """Note which groups have come and gone since the last call.

        The first call under another root of the pods has nothing to compare with.
        """
        layout = self._texts.layout
        if layout.driver is not Driver.SYSTEMD or not layout.has(_CONTROLLER):
            return
        found = {qos: self._slices_of(qos) for qos in KubeQoS} if layout.kubepods else {}
        if found and layout.kubepods == self._root:
            changed = {qos: len(found[qos] ^ self._groups[qos]) for qos in KubeQoS}
            turned = [qos for qos in KubeQoS if bool(found[qos]) != bool(self._groups[qos])]
            if any(changed.values()):
                self._changes.append(_Change(now, sum(changed.values()), frozenset(turned)))
        self._root, self._groups = layout.kubepods, found
        while self._changes and now - self._changes[0].at >= self._window_s:
            self._changes.popleft()

    def forget(self) -> None:
        """Compare the next `count` with nothing: what changed until then is not of that moment."""
        self._root = ""
        self._changes.clear()

    def resets_explained(self, place: str, now: float) -> int:
        """Return how many resets in the last `window_s` seconds the pods' groups explain.

        None for the root of the pods, which is the class Guaranteed: kubelet sets no weight there,
        and the slices of the other classes are below it at all times.
        """
        layout = self._texts.layout
        for qos in (KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT):
            if layout.kubepods and place == qos_dir(layout.driver, layout.kubepods, qos):
                self.count(now)
                return sum(change.groups + (qos in change.turned) for change in self._changes)
        return 0

    def _slices_of(self, qos: KubeQoS) -> frozenset[str]:
        layout = self._texts.layout
        directory = layout.directory(_CONTROLLER, qos_dir(layout.driver, layout.kubepods, qos))
        try:
            names = self._texts.host.listdir(directory)
        except OSError:
            return frozenset()  # no pod of the class has run yet
        return frozenset(name for name in names if name.endswith(".slice"))
