"""Which changes of the cluster may help a pod that a plugin refused, as a table.

A plugin names the kinds of objects and the actions on them after which its refusal may not hold any
more. A hint narrows that: it sees the object before and after the change and the refused pod.
Source of the rules: kube-scheduler's EventsToRegister and queueing hints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import cache
from typing import Any, Final

from cluster.scheduler.tables.pending import PendingPod, Shape

_log = logging.getLogger(__name__)

ANY_KIND: Final = "*"
"""In a registration: objects of every kind."""

NAMESPACE: Final = "Namespace"
NODE: Final = "Node"
POD: Final = "Pod"
"""A pod that has a node: placed, changed or gone. A pending pod's own change is not a cluster
event; `SchedulingQueue.add` takes it."""
RESERVATION: Final = "Reservation"
"""A Reservation that keeps resources, or kept them until now. A reserve pod is also a `POD`."""


class Action(Flag):
    """What happened to an object. The event of an update has every action that applies."""

    ADD = auto()
    DELETE = auto()
    UPDATE_NODE_ALLOCATABLE = auto()
    UPDATE_NODE_LABEL = auto()
    UPDATE_NODE_TAINT = auto()
    UPDATE_NODE_CONDITION = auto()
    UPDATE_NODE_ANNOTATION = auto()
    UPDATE_NODE_DECLARED_FEATURES = auto()
    UPDATE_POD_LABEL = auto()
    UPDATE_POD_SCALE_DOWN = auto()
    UPDATE_POD_TOLERATION = auto()
    UPDATE_OTHER = auto()
    """An update of any other kind, or of none of the parts above."""

    UPDATE = (
        UPDATE_NODE_ALLOCATABLE
        | UPDATE_NODE_LABEL
        | UPDATE_NODE_TAINT
        | UPDATE_NODE_CONDITION
        | UPDATE_NODE_ANNOTATION
        | UPDATE_NODE_DECLARED_FEATURES
        | UPDATE_POD_LABEL
        | UPDATE_POD_SCALE_DOWN
        | UPDATE_POD_TOLERATION
        | UPDATE_OTHER
    )
    ALL = ADD | DELETE | UPDATE


Hint = Callable[[PendingPod[Any], Any, Any], bool]
"""(pod, object before, object after) -> whether the change may help the pod. Before is None for an
added object, after is None for a deleted one. It may look at the pod's shape, not at its name,
because one pod is asked about for all that wait with it."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One row of a plugin: the changes after which its refusal may not hold any more.

    by_state: the hint looks at the present state and at neither object, so one answer covers many
    changes. It is given None for both objects.
    """

    kind: str
    actions: Action
    hint: Hint | None = None
    by_state: bool = False


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One change of the cluster.

    old: None for an added object; new: None for a deleted one. undoes: where the scheduler takes
    back a placement of its own, the order of that attempt: pods that were refused before it are not
    helped, because they were refused without it. gangs: those whose placements are taken back;
    their members were refused with the room that becomes free. Without these two, gangs that fit
    nowhere would wake each other for ever. not_for: the shape of a pod that gives up the room that
    it was promised, because the eviction of a victim was refused: pods of that shape would meet the
    same refusal, one after another. The pod itself backs off and is tried again.
    """

    kind: str
    action: Action
    old: Any = None
    new: Any = None
    undoes: int = 0
    gangs: tuple[str, ...] = ()
    not_for: Shape | None = None

    @property
    def concerns_all(self) -> bool:
        """Return whether no pod is excepted from those that the change may help."""
        return not (self.undoes or self.gangs or self.not_for is not None)


Interest = Mapping[str, tuple[Hint | None, ...]]
"""Plugin -> the hints to ask; None as a hint means that the change may always help."""


@cache
def event_name(kind: str, action: Action) -> str:
    """Return kube-scheduler's name of a change, such as NodeAdd; of several actions the first's."""
    first = next(iter(action))
    name = "" if first is Action.UPDATE_OTHER else f"{first.name}"
    words = "".join(word.capitalize() for word in name.split("_")) or "Update"
    return f"{'AssignedPod' if kind == POD else kind}{words}"


class EventTable:
    """The registrations of all plugins. A plugin without any is helped by no event."""

    def __init__(self, registrations: Mapping[str, Sequence[Registration]]) -> None:
        self._registrations = {plugin: tuple(rows) for plugin, rows in registrations.items()}
        self.by_state: Mapping[str, tuple[Hint | None, ...]] = {
            plugin: tuple({id(row.hint): row.hint for row in rows}.values())
            for plugin, rows in self._registrations.items()
            if rows and all(row.by_state for row in rows)
        }
        """Plugins whose hints all look at the present state alone, with these hints."""
        self._found: dict[tuple[str, Action], Interest] = {}

    def interest(self, kind: str, action: Action) -> Interest:
        """Return which plugins a change concerns. Empty for a change that helps no pod."""
        found = self._found.get((kind, action))
        if found is None:
            found = self._found[kind, action] = self._search(kind, action)
        return found

    def _search(self, kind: str, action: Action) -> Interest:
        result = {}
        for plugin, rows in self._registrations.items():
            hints = tuple(
                row.hint for row in rows if row.kind in (kind, ANY_KIND) and row.actions & action
            )
            if hints:
                result[plugin] = (None,) if None in hints else hints
        return result


def may_help(
    pod: PendingPod[Any], plugins: Iterable[str], event: ClusterEvent | None, interest: Interest
) -> bool:
    """Return whether a pod that `plugins` refused may be placed after `event`.

    event: None for several changes, where all hints are by state. interest: of the event. A hint
    that fails counts as yes, so that one bad object keeps no pod waiting.
    """
    old, new, kind = (None, None, "") if event is None else (event.old, event.new, event.kind)
    for plugin in plugins:
        for hint in interest.get(plugin, ()):
            if hint is None:
                return True
            try:
                if hint(pod, old, new):
                    return True
            except Exception:  # noqa: BLE001 - a plugin is isolated here
                _log.exception("the hint of plugin %s failed: %s event", plugin, kind)
                return True
    return False
