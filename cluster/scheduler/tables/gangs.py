"""The gangs, and how far each of their pods is.

A gang exists while a PodGroup defines it or a pod belongs to it. A pod belongs to one gang and is
pending, being tried, waiting on a node, being bound, or bound. A pod that terminated leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from apis.keys import ANNOTATION_GANG_MIN_AVAILABLE
from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.tables.gang_definitions import GangDefinition


class Step(Enum):
    """How far a member is."""

    PENDING = "pending"
    TRIED = "tried"
    """Out of the queue, and no decision yet."""
    WAITING = "waiting"
    """It has a node, and waits for the other members."""
    BINDING = "binding"
    """Allowed, and not known to be bound yet."""
    BOUND = "bound"


_WITHOUT_NODE: Final = frozenset({Step.PENDING, Step.TRIED})


@dataclass(slots=True, eq=False)
class Gang:
    """One gang. The definition is None while nothing usable defines it.

    by_pod_group: the definition is a PodGroup's. once_satisfied: a pod of its group was bound once.
    """

    id: str
    definition: GangDefinition | None = None
    by_pod_group: bool = False
    once_satisfied: bool = False
    members: dict[Step, dict[str, None]] = field(
        default_factory=lambda: {step: {} for step in Step}
    )

    def count(self, *steps: Step) -> int:
        """Return how many members are at one of `steps`."""
        return sum(len(self.members[step]) for step in steps)

    def __len__(self) -> int:
        return self.count(*Step)

    @property
    def group(self) -> tuple[str, ...]:
        """The ids of the gangs that are placed together with this one."""
        return self.definition.group if self.definition is not None else (self.id,)

    @property
    def complete(self) -> bool:
        """Whether as many pods exist as have to be placed together."""
        return self.definition is not None and len(self) >= self.definition.min_member


@dataclass(frozen=True, slots=True)
class _Member:
    gang: Gang
    step: Step


class Gangs:
    """All gangs by id, and the gang of each pod by its UID."""

    def __init__(self) -> None:
        self._gangs: dict[str, Gang] = {}
        self._members: dict[str, _Member] = {}
        self._named_by: dict[str, dict[str, None]] = {}
        """Id -> ids of the gangs whose group names it."""
        self.version = 0
        """Grows with every change of a definition, of who is a member, and of which members have a
        node. Whether one without a node is being tried does not count."""

    def __iter__(self) -> Iterator[Gang]:
        return iter(self._gangs.values())

    def get(self, gang: str) -> Gang | None:
        """Return a gang that exists."""
        return self._gangs.get(gang)

    def of(self, uid: str) -> Gang | None:
        """Return the gang of a pod, or None."""
        member = self._members.get(uid)
        return None if member is None else member.gang

    def step(self, uid: str) -> Step | None:
        """Return how far a pod is; None when it is in no gang."""
        member = self._members.get(uid)
        return None if member is None else member.step

    # --- changes -------------------------------------------------------------------------------

    def join(self, uid: str, gang: str, step: Step, defines: GangDefinition | None = None) -> Gang:
        """Make a pod a member, in place of any membership that it has.

        defines: the definition on the pod. It counts for an annotation gang without a definition;
        later pods do not change it.
        """
        member = self._members.get(uid)
        if member is not None and member.gang.id == gang:
            known = member.gang
            self.move(uid, step)
        else:
            self.leave(uid)
            known = self._gangs.setdefault(gang, Gang(gang))
            known.members[step][uid] = None
            self._members[uid] = _Member(known, step)
            self.version += 1
        if defines is not None and known.definition is None and not known.by_pod_group:
            self._define(known, defines)
        return known

    def move(self, uid: str, step: Step) -> None:
        """Record how far a member is; a pod in no gang is ignored."""
        member = self._members.get(uid)
        if member is None or member.step is step:
            return
        del member.gang.members[member.step][uid]
        member.gang.members[step][uid] = None
        self._members[uid] = _Member(member.gang, step)
        if not {member.step, step} <= _WITHOUT_NODE:
            self.version += 1

    def leave(self, uid: str) -> None:
        """End a membership. An annotation gang ends with its last pod."""
        member = self._members.pop(uid, None)
        if member is None:
            return
        gang = member.gang
        del gang.members[member.step][uid]
        self.version += 1
        if not gang.by_pod_group and not len(gang):
            self._define(gang, None)
            del self._gangs[gang.id]

    def define(self, definition: GangDefinition) -> Gang:
        """Take over a PodGroup. It replaces what pods of the gang define."""
        gang = self._gangs.get(definition.id)
        if gang is None:
            gang = self._gangs[definition.id] = Gang(definition.id)
        gang.by_pod_group = True
        self._define(gang, definition)
        return gang

    def undefine(self, gang_id: str) -> None:
        """Forget a PodGroup that was deleted or cannot be used; its pods stay members."""
        gang = self._gangs.get(gang_id)
        if gang is None or not gang.by_pod_group:
            return
        gang.by_pod_group = False
        self._define(gang, None)
        if not len(gang):
            del self._gangs[gang_id]

    def _define(self, gang: Gang, definition: GangDefinition | None) -> None:
        self.version += 1
        for name in gang.group:
            naming = self._named_by.get(name, {})
            naming.pop(gang.id, None)
            if not naming:
                self._named_by.pop(name, None)
        gang.definition = definition
        if definition is not None:
            for name in definition.group:
                self._named_by.setdefault(name, {})[gang.id] = None

    def satisfied_once(self, gang: Gang) -> bool:
        """Record that a pod of the gang was bound, for its peers too. Returns whether it is new."""
        new = False
        for other in self.peers(gang):
            new = new or not other.once_satisfied
            other.once_satisfied = True
        self.version += new
        return new

    # --- groups --------------------------------------------------------------------------------

    def group(self, gang: Gang) -> Iterator[Gang]:
        """Yield the gangs of a gang's group that exist."""
        for name in gang.group:
            other = self._gangs.get(name)
            if other is not None:
                yield other

    def peers(self, gang: Gang) -> Iterator[Gang]:
        """Yield the gangs that have the same group as `gang`, itself included.

        They share their fate. A gang that is named by another without naming it back is waited for,
        and does not wait itself.
        """
        group = gang.group
        return (other for other in self.group(gang) if other is gang or other.group == group)

    def naming(self, gang: Gang) -> Iterator[Gang]:
        """Yield the gangs whose group names `gang`, itself included."""
        for name in self._named_by.get(gang.id, ()):
            yield self._gangs[name]

    def members(self, gangs: Iterable[Gang], *steps: Step) -> tuple[str, ...]:
        """Return the UIDs of the members of `gangs` at one of `steps`."""
        return tuple(uid for gang in gangs for step in steps for uid in gang.members[step])

    def may_skip_group(self, gang: Gang) -> bool:
        """Return whether the members need not wait for each other any more."""
        return _may_skip(gang, self._once_satisfied(gang))

    def satisfied(self, gang: Gang) -> bool:
        """Return whether enough members of every gang of the group have a node."""
        once = self._once_satisfied(gang)
        for name in gang.group:
            other = self._gangs.get(name)
            if other is None:
                return False
            peer = other is gang or other.group == gang.group
            if not _has_enough(other, once if peer else self._once_satisfied(other)):
                return False
        return True

    def missing(self, gang: Gang) -> int:
        """Return how many more members have to get a node, so that the gang has enough."""
        if gang.definition is None or self.may_skip_group(gang):
            return 0
        return max(0, _missing(gang, gang.definition))

    def _once_satisfied(self, gang: Gang) -> bool:
        return any(other.once_satisfied for other in self.peers(gang))

    def why_closed(self, gang_id: str) -> str | None:
        """Return why pods of a gang cannot be tried yet; None when they can.

        The text does not change with each pod that is created, so a pod's condition is written
        once.
        """
        gang = self._gangs.get(gang_id)
        if gang is None or gang.definition is None:
            return (
                f"gang {gang_id} has no minimum: there is no valid PodGroup {gang_id}, and no pod"
                f" of the gang with a valid annotation {ANNOTATION_GANG_MIN_AVAILABLE}"
            )
        if self.may_skip_group(gang):
            return None
        for name in gang.group:
            other = self._gangs.get(name)
            if other is None or other.definition is None:
                return f"gang {gang_id} waits for gang {name} of its group, which has no minimum"
            if not other.complete:
                least = other.definition.min_member
                return f"gang {gang_id} waits until gang {name} has at least {least} pods"
        return None


def _may_skip(gang: Gang, once: bool) -> bool:
    definition = gang.definition
    return (
        once
        and definition is not None
        and definition.match_policy is GangMatchPolicy.ONCE_SATISFIED
    )


def _has_enough(gang: Gang, once: bool) -> bool:
    definition = gang.definition
    if definition is None:
        return False
    if _may_skip(gang, once):
        return True
    return _missing(gang, definition) <= 0


def _missing(gang: Gang, definition: GangDefinition) -> int:
    """Return how many more members have to get a node; 0 or less when enough have one."""
    placed = gang.count(Step.WAITING, Step.BINDING)
    if definition.match_policy is GangMatchPolicy.WAITING_AND_RUNNING:
        placed += gang.count(Step.BOUND)
    return definition.min_member - placed
