"""What a ScheduleExplanation is answered: whether pods are scheduled, where, and why not.

A question names a pod (namespace/name), the pods of a namespace whose label
`scheduling.koordinator.sh/questioned-object-key` has that name, or a gang; several are separated by
commas. Pods of other namespaces than the ScheduleExplanation's are left out: who may create the
object in one namespace may not read pods of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from apis.core import ObjectMeta
from apis.keys import LABEL_QUESTIONED_OBJECT_KEY
from apis.schedule_explanation import (
    DetailedExplanation,
    FeasibleSchedulingResult,
    NodeFailedDetail,
    ScheduleExplanation,
    ScheduleExplanationStatus,
    SchedulingAttempt,
)
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.reasons.failed_nodes import failed_nodes

_MOST_PODS: Final = 1000
"""Of one question. Chosen: larger than most jobs, and looked up in a few milliseconds."""
_MOST_PLACED: Final = 100
"""Pods with a node that a status lists. Chosen: below 30 KB; kubectl lists the others."""
_MOST_CHARACTERS: Final = 4096
"""Of a questionObjectKey. Chosen: `_MOST_KEYS` keys of 64 characters; names are mostly shorter. The
cache keeps so much of each object: twice the value doubles what a user can make it keep."""
_MOST_KEYS: Final = 64
"""Of a questionObjectKey. Chosen: more than the jobs that one user looks after."""
_LONGEST_TTL: Final = 64
"""Characters that `apis.meta.parse_duration` reads."""

NO_PODS: Final = "no pod is waiting or running under this key"


def kept_question(explanation: ScheduleExplanation) -> ScheduleExplanation:
    """Return what the cache keeps of an object: no status, and what a user writes cut to a length
    that is still refused."""
    meta, spec = explanation.metadata, explanation.spec
    return ScheduleExplanation(
        metadata=ObjectMeta(
            name=meta.name,
            namespace=meta.namespace,
            uid=meta.uid,
            resource_version=meta.resource_version,
            creation_timestamp=meta.creation_timestamp,
        ),
        spec=msgspec.structs.replace(
            spec,
            question_object_key=spec.question_object_key[: _MOST_CHARACTERS + 1],
            question_object_template=None,
            ttl=None if spec.ttl is None else spec.ttl[: _LONGEST_TTL + 1],
        ),
    )


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

    def answer(self, namespace: str, key: str) -> ScheduleExplanationStatus:
        """Return the status of an explanation, without the time of its last update.

        namespace: the explanation's. key: its questionObjectKey.
        """
        if refused := _refused(key):
            return ScheduleExplanationStatus(failed_message=refused)
        keys = dict.fromkeys(filter(None, (part.strip() for part in key.split(","))))
        own = [each for each in keys if each.startswith(f"{namespace}/")]
        notes: list[str] = []
        if left_out := len(keys) - len(own):
            notes.append(
                f"spec.questionObjectKey: {left_out} of {len(keys)} keys do not begin with "
                f"{namespace}/ and are left out"
            )
        pods = self._pods_of(own)
        if not pods:
            return ScheduleExplanationStatus(failed_message="; ".join((NO_PODS, *notes)))
        placed: list[FeasibleSchedulingResult] = []
        missing: list[tuple[SchedulingPod, str]] = []
        for pod in pods:
            meta = pod.metadata
            node, text = self._core.node_and_message(pod)
            if node:
                result = FeasibleSchedulingResult(meta.namespace, meta.name, meta.uid, node)
                placed.append(result)
            else:
                missing.append((pod, text))
        schedulable = not missing
        after = schedulable or all(pod.status.nominated_node_name for pod, _ in missing)
        if len(placed) > _MOST_PLACED:
            notes.append(f"{_MOST_PLACED} of {len(placed)} pods with a node are listed")
        first = next((text for _, text in missing if text), "")
        message = "; ".join(filter(None, (first, *notes)))
        attempt = SchedulingAttempt(
            schedulable=schedulable,
            failed_message=message,
            feasible_scheduling_result=tuple(placed[:_MOST_PLACED]),
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

    def _pods_of(self, keys: Iterable[str]) -> list[SchedulingPod]:
        found: dict[str, SchedulingPod] = {}
        for one in keys:
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


def _refused(key: str) -> str:
    """Return why a questionObjectKey is not answered, or ""."""
    if len(key) > _MOST_CHARACTERS:
        return f"spec.questionObjectKey is longer than {_MOST_CHARACTERS} characters"
    if (count := key.count(",") + 1) > _MOST_KEYS:
        return f"spec.questionObjectKey has {count} keys; at most {_MOST_KEYS} are answered"
    return ""
