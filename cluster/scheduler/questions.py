"""What a ScheduleExplanation is answered: whether pods are scheduled, where, and why not.

A question names a pod (namespace/name), the pods of a namespace whose label
`scheduling.koordinator.sh/questioned-object-key` has that name, or a gang; several are separated by
commas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from apis.keys import LABEL_QUESTIONED_OBJECT_KEY
from apis.schedule_explanation import (
    DetailedExplanation,
    FeasibleSchedulingResult,
    NodeFailedDetail,
    ScheduleExplanationStatus,
    SchedulingAttempt,
)
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.reasons.failed_nodes import failed_nodes

_MOST_PODS: Final = 1000
"""Of one question. Chosen: larger than most jobs; the answer stays below 200 KB."""

NO_PODS: Final = "no pod is waiting or running under this key"


class Questions:
    """Answers questions about the pods of a core."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        gang_of = core.gangs.gang_of

        def keys_of(pod: SchedulingPod) -> Iterator[str]:
            label = pod.metadata.labels.get(LABEL_QUESTIONED_OBJECT_KEY)
            if label:
                yield f"{pod.metadata.namespace}/{label}"
            if gang := gang_of(pod):
                yield gang

        self._members = core.pods.index(keys_of)

    def answer(self, key: str) -> ScheduleExplanationStatus:
        """Return the status of an explanation, without the time of its last update."""
        pods = self._pods_of(key)
        if not pods:
            return ScheduleExplanationStatus(failed_message=NO_PODS)
        placed: list[FeasibleSchedulingResult] = []
        missing: list[tuple[SchedulingPod, str]] = []
        for pod in pods:
            meta = pod.metadata
            why = self._core.why(f"{meta.namespace}/{meta.name}") or {}
            node = str(why.get("node", ""))
            if node:
                result = FeasibleSchedulingResult(meta.namespace, meta.name, meta.uid, node)
                placed.append(result)
            else:
                missing.append((pod, str(why.get("message", ""))))
        schedulable = not missing
        after = schedulable or all(pod.status.nominated_node_name for pod, _ in missing)
        message = next((text for _, text in missing if text), "")
        attempt = SchedulingAttempt(
            schedulable=schedulable,
            failed_message=message,
            feasible_scheduling_result=tuple(placed),
            node_failed_details=self._details(pod for pod, _ in missing),
        )
        detail = DetailedExplanation(
            schedulable=schedulable,
            schedulable_after_preemption=after,
            failed_message=message,
            schedule_explanation=attempt,
        )
        return ScheduleExplanationStatus(
            schedulable=schedulable,
            schedulable_after_preemption=after,
            failed_message=message,
            detailed_explanation=(detail,),
        )

    def _pods_of(self, key: str) -> list[SchedulingPod]:
        found: dict[str, SchedulingPod] = {}
        for one in filter(None, (part.strip() for part in key.split(","))):
            pod = self._core.pods.items.get(one)
            for each in (*(() if pod is None else (pod,)), *self._members.get(one)):
                found[f"{each.metadata.namespace}/{each.metadata.name}"] = each
        return [found[name] for name in sorted(found)[:_MOST_PODS]]

    def _details(self, pods: Iterable[SchedulingPod]) -> tuple[NodeFailedDetail, ...]:
        """Return what holds the first of the pods back as the nodes are now."""
        core = self._core
        for pod in pods:
            profile = pod.spec.scheduler_name
            if profile not in core.plugins.profiles:
                continue
            shape = core.source.shape_of(pod)
            evaluation = core.scheduling.examine(shape, profile)
            if evaluation is not None:
                return failed_nodes(shape, core.tables, evaluation.masks)
        return ()
