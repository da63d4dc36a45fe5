"""Which changes of pods may help a pod that spread or affinity between pods refused.

Without these hints each pod that is bound would have every such pod tried again. A hint looks at
the pod that changed alone, not at counts: it may wake a pod in vain, and never leaves one asleep
that could be placed. Source of the rules: kube-scheduler's queueing hints;
docs/facts/scheduler.md, "The queue".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.plugins.between_pods.pod_affinity import terms_of
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

ShapeOf = Callable[[SchedulingPod], PodShape]


class ChangedPod:
    """Reads the shapes of a pod before and after a change, once for all pods that wait."""

    def __init__(self, shape_of: ShapeOf) -> None:
        self._shape_of = shape_of
        self._old: tuple[Any, PodShape | None] = (None, None)
        self._new: tuple[Any, PodShape | None] = (None, None)

    def shapes(self, old: Any, new: Any) -> tuple[PodShape | None, PodShape | None]:
        """Return both shapes; None where there is no pod. A pod may be a PendingPod as well."""
        if self._old[0] is not old:
            self._old = old, self._shape(old)
        if self._new[0] is not new:
            self._new = new, self._shape(new)
        return self._old[1], self._new[1]

    def _shape(self, pod: Any) -> PodShape | None:
        if pod is None:
            return None
        if isinstance(pod, PendingPod):
            shape: PodShape = pod.shape
            return shape
        return self._shape_of(pod)


class SpreadHint:
    """Whether a hard constraint of the waiting pod counts the pod that changed."""

    def __init__(
        self, spreads: Mapping[str, PodTopologySpread], tables: Tables, changed: ChangedPod
    ) -> None:
        """spreads: the plugin by scheduler name."""
        self._spreads = spreads
        self._tables = tables
        self._changed = changed

    def __call__(self, pod: PendingPod[Any], old: Any, new: Any) -> bool:
        shapes = [shape for shape in self._changed.shapes(old, new) if shape is not None]
        spread = self._spreads.get(pod.shape.scheduler_name)
        if not shapes or spread is None:
            # No pod changed: a node is promised to a pod no longer.
            return True
        counted = spread.counted(pod.shape, self._tables, "DoNotSchedule")
        return any(counter.weigh(shape) for _, counter in counted for shape in shapes)


class AffinityHint:
    """Whether a term of the waiting pod means the pod that changed, or the other way round.

    Affinity: a pod that all required terms select may be the one that was missing. If the last such
    pod is gone, the first pod of a group, which its own terms select, may be placed. Anti-affinity:
    only a pod that is gone, or whose labels changed, can help.
    """

    def __init__(self, tables: Tables, changed: ChangedPod) -> None:
        self._tables = tables
        self._changed = changed

    def __call__(self, pod: PendingPod[Any], old: Any, new: Any) -> bool:
        before, after = self._changed.shapes(old, new)
        shapes = [shape for shape in (before, after) if shape is not None]
        if not shapes:
            return True
        own = terms_of(pod.shape, self._tables)
        if own.affinity and any(
            all(term.pods.match(shape) for term in own.affinity) for shape in shapes
        ):
            return True
        return before is not None and (
            any(term.pods.match(before) for term in own.anti_affinity)
            or any(
                term.pods.match(pod.shape) for term in terms_of(before, self._tables).anti_affinity
            )
        )
