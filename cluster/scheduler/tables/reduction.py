"""The part of a pod's shape that decides what nodes mean for it.

Pods of different quotas, gangs, priorities or StatefulSets often differ in nothing that a filter or
a score looks at. Their shapes have one reduced shape, for which masks and scores are kept. A label
or namespace stays in it if a selector mentions it now, or the pod's own constraints do. A label
that comes to be mentioned separates the pods again, because it is another reduced shape then.

Filters and scores are given the reduced shape alone, so what is left out cannot decide anything.
Admissions, allocators and preemption look at the whole shape.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from apis.decode import encode
from apis.keys import ANNOTATION_RESERVE_POD, LABEL_OPERATING_MODE
from apis.scheduling_pod import SchedulingPodSpec
from cluster.scheduler.tables.mentions import (
    EVERY_NAMESPACE,
    OWNERS,
    Mention,
    Mentions,
    label,
    mentioned_by_pod,
    namespace,
)
from cluster.scheduler.tables.shapes import PodShape

_READ: Final = "koordinator.sh/"
"""Labels whose key contains this may be read by filters and scores without a selector."""
_OF_QUOTAS: Final = "quota.scheduling.koordinator.sh/"
"""Labels and annotations about quotas are read by the admission alone, which sees every pod."""
_OF_GANGS: Final = "gang.scheduling.koordinator.sh/"
"""Annotations about gangs are read before filters and scores are asked."""
_NO_SPEC: Final = SchedulingPodSpec()


class Reduction:
    """Keeps one reduced shape for each content, as long as it is referenced."""

    def __init__(self, mentions: Mentions) -> None:
        self._mentions = mentions
        self._kept: WeakKeyDictionary[PodShape, tuple[int, PodShape]] = WeakKeyDictionary()
        """Shape -> (version of the mentions, reduced shape)."""
        self._known: WeakValueDictionary[bytes, PodShape] = WeakValueDictionary()

    @property
    def version(self) -> int:
        """Grows when what is mentioned changes: a shape may have another reduced shape then."""
        return self._mentions.version

    def of(self, shape: PodShape) -> PodShape:
        """Return the reduced shape of a shape, as of what is mentioned now."""
        version = self._mentions.version
        kept = self._kept.get(shape)
        if kept is not None and kept[0] == version:
            return kept[1]
        if _is_whole(shape):
            return shape
        reduced = _reduced(shape, self._mentions.now | shape.derived(mentioned_by_pod))
        reduced = self._known.setdefault(_content(reduced), reduced)
        self._kept[shape] = version, reduced
        return reduced


def _is_whole(shape: PodShape) -> bool:
    """Return whether a shape is of a single pod, or of one that is a reservation itself."""
    return (
        shape.identity is not None
        or ANNOTATION_RESERVE_POD in shape.annotations
        or LABEL_OPERATING_MODE in shape.labels
    )


def _reduced(shape: PodShape, mentioned: Set[Mention]) -> PodShape:
    in_namespace = EVERY_NAMESPACE in mentioned or namespace(shape.namespace) in mentioned
    return replace(
        shape,
        namespace=shape.namespace if in_namespace else "",
        labels={
            key: value
            for key, value in shape.labels.items()
            if label(key) in mentioned or (_READ in key and not key.startswith(_OF_QUOTAS))
        },
        annotations={
            key: text
            for key, text in shape.annotations.items()
            if not key.startswith((_OF_QUOTAS, _OF_GANGS))
        },
        owner_references=shape.owner_references if OWNERS in mentioned else (),
        owner="",
        priority=0,
        preemption_policy="",
        gates=(),
        spec=_NO_SPEC,
        _derived={},
    )


def _content(shape: PodShape) -> bytes:
    """Return a text that is equal for equal reduced shapes, and for no others."""
    return encode(
        (
            shape.namespace,
            shape.labels,
            shape.annotations,
            shape.scheduler_name,
            shape.priority_class,
            shape.qos,
            shape.kube_qos,
            shape.requests,
            shape.limits,
            shape.scored,
            shape.scored_pending,
            shape.node_selector,
            shape.affinity,
            shape.tolerations,
            shape.spread,
            shape.spread_by,
            shape.ports,
            shape.images,
            shape.image_volumes,
            shape.claims,
            shape.disks,
            shape.resource_claims,
            shape.features,
            shape.owner_kind,
            shape.owner_references,
        )
    )
