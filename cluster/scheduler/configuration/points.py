"""Extension points, and which plugin can be enabled at which: what a profile may name.

Of kube-scheduler's plugins these are the ones of version 1.35 and, so that newer files are read,
of 1.36. What a plugin extends is upstream's, because a file that upstream takes has to be read here
too; docs/facts/scheduler.md, "Configuration file".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Point(StrEnum):
    """A step of scheduling at which plugins are called, named as in the file."""

    PRE_ENQUEUE = "preEnqueue"
    QUEUE_SORT = "queueSort"
    PRE_FILTER = "preFilter"
    FILTER = "filter"
    POST_FILTER = "postFilter"
    PRE_SCORE = "preScore"
    SCORE = "score"
    RESERVE = "reserve"
    PERMIT = "permit"
    PRE_BIND = "preBind"
    BIND = "bind"
    POST_BIND = "postBind"


@dataclass(frozen=True, slots=True)
class Known:
    """A plugin. points: where it can be enabled; left_out: why it has no effect here, or ""."""

    points: frozenset[Point]
    left_out: str = ""


def _at(points: Set[Point], left_out: str = "") -> Known:
    return Known(frozenset(points), left_out)


_ENQUEUE, _PRE_FILTER, _FILTER = Point.PRE_ENQUEUE, Point.PRE_FILTER, Point.FILTER
_POST_FILTER, _PRE_SCORE, _SCORE = Point.POST_FILTER, Point.PRE_SCORE, Point.SCORE
_RESERVE, _PERMIT, _PRE_BIND = Point.RESERVE, Point.PERMIT, Point.PRE_BIND

PLUGINS: Final[Mapping[str, Known]] = {
    # kube-scheduler's
    "SchedulingGates": _at({_ENQUEUE}),
    "PrioritySort": _at({Point.QUEUE_SORT}),
    "NodeUnschedulable": _at({_FILTER}),
    "NodeName": _at({_FILTER}),
    "TaintToleration": _at({_FILTER, _PRE_SCORE, _SCORE}),
    "NodeAffinity": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE}),
    "NodePorts": _at({_PRE_FILTER, _FILTER}),
    "NodeResourcesFit": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE}),
    "VolumeRestrictions": _at({_PRE_FILTER, _FILTER}),
    "NodeVolumeLimits": _at({_PRE_FILTER, _FILTER}),
    "VolumeBinding": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE, _RESERVE, _PRE_BIND}),
    "VolumeZone": _at({_PRE_FILTER, _FILTER}),
    "PodTopologySpread": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE}),
    "InterPodAffinity": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE}),
    "DynamicResources": _at(
        {_ENQUEUE, _PRE_FILTER, _FILTER, _POST_FILTER, _SCORE, _RESERVE, _PRE_BIND},
        left_out="pods with resource claims are refused",
    ),
    "DefaultPreemption": _at({_ENQUEUE, _POST_FILTER}),
    "NodeResourcesBalancedAllocation": _at({_PRE_SCORE, _SCORE}),
    "ImageLocality": _at({_SCORE}),
    "DefaultBinder": _at({Point.BIND}),
    "NodeDeclaredFeatures": _at({_PRE_FILTER, _FILTER}),
    "GangScheduling": _at(
        {_ENQUEUE, _RESERVE, _PERMIT}, left_out="gangs are scheduled by Coscheduling"
    ),
    # Koordinator's
    "LoadAwareScheduling": _at({_PRE_FILTER, _FILTER, _SCORE, _RESERVE}),
    "NodeNUMAResource": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE, _RESERVE, _PRE_BIND}),
    "Reservation": _at(
        {_PRE_FILTER, _FILTER, _POST_FILTER, _PRE_SCORE, _SCORE, _RESERVE, _PRE_BIND, Point.BIND}
    ),
    "Coscheduling": _at(
        {
            _ENQUEUE,
            _PRE_FILTER,
            _POST_FILTER,
            _PRE_SCORE,
            _SCORE,
            _RESERVE,
            _PERMIT,
            _PRE_BIND,
            Point.POST_BIND,
        }
    ),
    "DeviceShare": _at({_PRE_FILTER, _FILTER, _PRE_SCORE, _SCORE, _RESERVE, _PRE_BIND}),
    "ElasticQuota": _at({_PRE_FILTER, _POST_FILTER, _RESERVE}),
    "DefaultPreBind": _at({_PRE_BIND}),
    "NodeResourcesFitPlus": _at({_PRE_SCORE, _SCORE}),
    "ScarceResourceAvoidance": _at({_PRE_SCORE, _SCORE}),
    "SchedulingHint": _at({_PRE_FILTER}),
}

DEFAULT_MULTI_POINT: Final = (
    "SchedulingGates",
    "PrioritySort",
    "NodeUnschedulable",
    "NodeName",
    "TaintToleration",
    "NodeAffinity",
    "NodePorts",
    "NodeResourcesFit",
    "VolumeRestrictions",
    "NodeVolumeLimits",
    "VolumeBinding",
    "VolumeZone",
    "PodTopologySpread",
    "InterPodAffinity",
    "DefaultPreemption",
    "NodeResourcesBalancedAllocation",
    "ImageLocality",
    "DefaultBinder",
    "NodeDeclaredFeatures",
)
"""kube-scheduler's plugins of a profile that names none, in their order. kube-scheduler has
DynamicResources among them, which is left out here."""

DEFAULT_WEIGHTS: Final[Mapping[str, int]] = {
    "TaintToleration": 3,
    "NodeAffinity": 2,
    "PodTopologySpread": 2,
    "InterPodAffinity": 2,
}
"""kube-scheduler's weights of these plugins' scores, where they are not 1."""

REMOVED: Final = frozenset(
    {
        "AzureDiskLimits",
        "CinderLimits",
        "EBSLimits",
        "GCEPDLimits",
        "NodeLabel",
        "NodePreferAvoidPods",
        "NodeResourcesLeastAllocated",
        "NodeResourcesMostAllocated",
        "RequestedToCapacityRatio",
        "SelectorSpread",
        "ServiceAffinity",
    }
)
"""Plugins of earlier kube-schedulers. A file may still disable them."""
