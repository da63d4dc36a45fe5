"""After which changes of the cluster a plugin's refusal may not hold any more, as a table.

A pod waits until a change of one of its refusing plugins' rows. Source of the rules of Kubernetes'
own plugins: kube-scheduler's registrations; docs/facts/scheduler.md, "The queue".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cluster.scheduler.cycle.events import (
    NODE,
    POD,
    RESERVATION,
    Action,
    EventTable,
    Hint,
    Registration,
)
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA

_NODE_ADDED: Final = Action.ADD
_RESERVED: Final = Registration(RESERVATION, Action.ALL)
"""Room may be reserved for the pod from now on, or not reserved for others any more."""

_TABLE: Final[Mapping[str, Sequence[Registration]]] = {
    "NoNodes": (Registration(NODE, _NODE_ADDED),),
    "NodeUnschedulable": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_TAINT),),
    "TaintToleration": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_TAINT),),
    "NodeAffinity": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),),
    "NodePorts": (Registration(NODE, _NODE_ADDED), Registration(POD, Action.DELETE), _RESERVED),
    "NodeResourcesFit": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        _RESERVED,
    ),
    "PodTopologySpread": (
        Registration(
            NODE,
            _NODE_ADDED | Action.DELETE | Action.UPDATE_NODE_LABEL | Action.UPDATE_NODE_TAINT,
        ),
        Registration(
            POD, Action.ADD | Action.DELETE | Action.UPDATE_POD_LABEL | Action.UPDATE_OTHER
        ),
    ),
    "InterPodAffinity": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.ADD | Action.DELETE | Action.UPDATE_POD_LABEL),
    ),
    "LoadAwareScheduling": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(NODE, Action.UPDATE_NODE_ANNOTATION),
        Registration(POD, Action.DELETE),
        Registration("NodeMetric", Action.ALL),
    ),
    "NodeNUMAResource": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(NODE, Action.UPDATE_NODE_ANNOTATION | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.DELETE),
        Registration("NodeResourceTopology", Action.ALL),
        _RESERVED,
    ),
    "SchedulingHint": (Registration(NODE, _NODE_ADDED),),
    "DeviceShare": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.DELETE),
        Registration("Device", Action.ALL),
        _RESERVED,
    ),
    "Reservation": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        _RESERVED,
    ),
}


def registrations(quota_hint: Hint | None = None) -> EventTable:
    """Return the table of all plugins. A plugin without a row waits for an edit of the pod.

    quota_hint: whether a pod that ElasticQuota refused may pass; a change may come from anywhere in
    the tree of quotas, so it is asked about all that give resources back or add some.
    """
    quotas = tuple(
        Registration(kind, actions, quota_hint)
        for kind, actions in (
            (NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
            (POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN | Action.UPDATE_POD_LABEL),
            (ELASTIC_QUOTA, Action.ALL),
        )
    )
    return EventTable({**_TABLE, ELASTIC_QUOTA: quotas})
