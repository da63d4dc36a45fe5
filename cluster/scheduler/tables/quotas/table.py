"""All quotas, and the pods that count for each.

A pod without a node counts in the request of its quota, a pod with a node in request and use, on a
known node or not. Pods of one shape have one quota, so they are counted together. A change of the
definitions alone is taken over in place; where names, parents or resources change, the trees are
built again from the counts of the shapes, when they are next looked at.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from apis.errors import InputError
from apis.keys import (
    ANNOTATION_RESERVE_POD,
    DEFAULT_QUOTA,
    LABEL_PREEMPTIBLE,
    LABEL_QUOTA_NAME,
    ROOT_QUOTA,
    SYSTEM_QUOTA,
)
from apis.quota import ElasticQuota
from apis.scheduling_pod import SchedulingNode
from cluster.quota_tree import quota_of_pod
from cluster.scheduler.tables.amounts import Amounts, amounts_of
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.definitions import QuotaDefinition, define
from cluster.scheduler.tables.quotas.forest import Definitions
from cluster.scheduler.tables.quotas.tree import QuotaNode, Sharing
from cluster.scheduler.tables.shapes import PodShape

_SPARE_ENDS: Final = 64
"""Ends of grace periods that are kept at least although their pods are gone, so that a few pods
cause no constant sorting; chosen as for the work queues."""


class Terminating(Enum):
    """How long a pod that is being deleted counts for its quota."""

    ALWAYS = "until it is gone"
    IN_GRACE_PERIOD = "until its grace period is over"
    NEVER = "not at all"


@dataclass(frozen=True, slots=True)
class QuotaSettings:
    """default_most, system_most: limits of the built-in quotas while they have no objects.
    namespace: where these objects are; others of their names do not count.

    default: pods that name no quota count for koordinator-default-quota. overhead: the overhead of
    pods counts. terminating: how long pods count that are being deleted.
    """

    default_most: Amounts = field(default_factory=dict)
    system_most: Amounts = field(default_factory=dict)
    namespace: str = "koordinator-system"
    sharing: Sharing = field(default_factory=Sharing)
    several_trees: bool = False
    default: bool = True
    overhead: bool = True
    terminating: Terminating = Terminating.ALWAYS


@dataclass(frozen=True, slots=True)
class PodQuota:
    """The quota of the pods of one shape.

    requests: what one pod counts with, of the resources that the quota limits. firm: the pods are
    not preemptible. problem: why the quota that the pods name cannot be used; it is None then.
    """

    quota: QuotaNode | None
    requests: Amounts
    firm: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Group:
    """The pods of one shape. requesting: how many there are, with and without a node."""

    belongs: PodQuota
    requesting: int = 0
    placed: dict[str, Booking] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pod:
    """pending: the shape of the pod while no binding of it is seen. booking: where it counts."""

    pending: PodShape | None = None
    booking: Booking | None = None

    @property
    def shape(self) -> PodShape | None:
        return self.pending if self.booking is None else self.booking.shape


_NO_POD = _Pod()


class QuotaTable:
    """Follows ElasticQuotas, nodes, pods without a node, and bookings."""

    def __init__(self, settings: QuotaSettings | None = None) -> None:
        self.settings = settings or QuotaSettings()
        self.version = 0
        """Grows with every change of a definition, a count or the total."""
        self._definitions = Definitions(
            several_trees=self.settings.several_trees, built_in_namespace=self.settings.namespace
        )
        self._groups: dict[PodShape, _Group] = {}
        self._pods: dict[str, _Pod] = {}
        self._allocatable: dict[int, Amounts] = {}
        self._total: Counter[str] = Counter()
        self._nodes: dict[str, QuotaNode] = {}
        self._tops: dict[str, QuotaNode] = {}
        self._tree_totals: dict[str, Amounts] = {}
        self._outside: Counter[str] = Counter()
        """What trees take out of the default tree."""
        self._of_namespace: dict[str, str] = {}
        self._own_namespace: dict[str, str] = {}
        self._stale = True
        self._now = 0.0
        self._ending: list[tuple[float, str]] = []
        """A heap: when the grace period of a pod that counts is over, and its UID."""
        self._ends: dict[str, float] = {}
        """UID -> the last entry of the pod in the heap."""

    def advance(self, now: float) -> bool:
        """Take the pods out whose grace period is over; return whether there were any.

        now: seconds since 1970.
        """
        self._now = now
        ended = False
        while self._ending and self._ending[0][0] <= self._now:
            end, uid = heapq.heappop(self._ending)
            if self._ends.get(uid) != end:
                # It is gone, or has got a longer grace period.
                continue
            del self._ends[uid]
            pod = self._pods.get(uid, _NO_POD)
            if pod.booking is not None and not self._counts(pod.booking):
                self._change(uid, pod.pending, None)
                ended = True
        return ended

    def _end_at(self, booking: Booking) -> None:
        in_time = self.settings.terminating is Terminating.IN_GRACE_PERIOD
        if in_time and self._ends.get(booking.uid) != booking.ends:
            self._ends[booking.uid] = booking.ends
            heapq.heappush(self._ending, (booking.ends, booking.uid))
            if len(self._ending) > 2 * len(self._ends) + _SPARE_ENDS:
                # A grace period may be years long, and its pod be gone today.
                self._ending = [(end, uid) for uid, end in self._ends.items()]
                heapq.heapify(self._ending)

    def _counts(self, booking: Booking) -> bool:
        """Return whether a pod with a node counts now."""
        if not booking.terminating or self.settings.terminating is Terminating.ALWAYS:
            return True
        return self.settings.terminating is not Terminating.NEVER and booking.ends > self._now

    # --- quotas --------------------------------------------------------------------------------

    def set_quota(self, quota: ElasticQuota) -> str:
        """Take the present state of a quota; return why it cannot be used, or ""."""
        key = f"{quota.metadata.namespace}/{quota.metadata.name}"
        if quota.metadata.name == ROOT_QUOTA:
            # It stands for the tops of the trees, whose amounts are those of the nodes.
            return ""
        name = quota.metadata.name
        lacked = self._definitions.left_out(name) is None
        try:
            definition = define(quota)
        except InputError as error:
            self._definitions.unreadable(key, str(error))
        else:
            before = self._definitions.in_force.get(name)
            if self._definitions.set(definition):
                self.version += 1
                self._stale = self._stale or not self._redefine(before)
        self._note(name, lacked)
        return self._definitions.problems().get(key, "")

    def delete_quota(self, key: str) -> None:
        """Forget a quota, by namespace/name."""
        name = key.rpartition("/")[2]
        lacked = self._definitions.left_out(name) is None
        if self._definitions.delete(key):
            self.version += 1
            self._stale = True
        self._note(name, lacked)

    def _note(self, name: str, lacked: bool) -> None:
        """Have the pods that name a quota counted again where it began or ceased to be left out."""
        if lacked != (self._definitions.left_out(name) is None):
            self.version += 1
            self._stale = True

    def problems(self) -> Mapping[str, str]:
        """Return why quotas, by namespace/name, are not in force as their objects say."""
        return self._definitions.problems()

    def _redefine(self, before: QuotaDefinition | None) -> bool:
        """Take over other amounts in place; return whether that was all that changed."""
        if before is None or self._stale:
            return False
        after = self._definitions.in_force[before.name]
        node = self._nodes.get(before.name)
        alike = (
            before.key == after.key
            and before.parent == after.parent
            and before.tree == after.tree
            and before.namespaces == after.namespaces
            and before.most.keys() == after.most.keys()
            and before.total == after.total
            and before.outside_default == after.outside_default
        )
        if node is None or not alike:
            return False
        node.redefine(after)
        return True

    # --- pods and nodes ------------------------------------------------------------------------

    def want(self, uid: str, shape: PodShape) -> bool:
        """Count the request of a pod without a node; return whether one of another shape ended."""
        before = self._pods.get(uid, _NO_POD)
        self._change(uid, shape, before.booking)
        return before.shape is not None and before.shape is not self._pods[uid].shape

    def unwant(self, uid: str) -> bool:
        """Forget that a pod is pending: it is bound or gone. Its booking, if any, counts on.

        Returns whether its request ended.
        """
        pod = self._pods.get(uid)
        if pod is None or pod.pending is None:
            return False
        self._change(uid, None, pod.booking)
        return pod.booking is None

    def place(self, booking: Booking) -> None:
        """Count the use of a pod that has a node."""
        counts = self._counts(booking)
        if counts and booking.terminating:
            self._end_at(booking)
        pending = self._pods.get(booking.uid, _NO_POD).pending
        self._change(booking.uid, pending, booking if counts else None)

    def remove(self, booking: Booking) -> None:
        """Take back what `place` did with the same booking."""
        self._ends.pop(booking.uid, None)
        self._change(booking.uid, self._pods.get(booking.uid, _NO_POD).pending, None)

    def set_node(self, row: int, node: SchedulingNode) -> None:
        """Count what a node has in the total of the default tree."""
        self.forget_node(row)
        self._allocatable[row] = amounts = amounts_of(node.status.allocatable)
        self._total.update(amounts)
        self.version += 1

    def forget_node(self, row: int) -> None:
        """Take a node out of the total."""
        amounts = self._allocatable.pop(row, None)
        if amounts is not None:
            self._total.subtract(amounts)
            self.version += 1

    def _change(self, uid: str, pending: PodShape | None, booking: Booking | None) -> None:
        before = self._pods.get(uid, _NO_POD)
        after = _Pod(pending, booking)
        if before == after:
            return
        # Counts are changed in trees that hold them, never in between.
        self.settle()
        self.version += 1
        if before.booking is not booking:
            if before.booking is not None:
                del self._groups[before.booking.shape].placed[uid]
                self._count(before.booking.shape, 0, -1)
            if booking is not None:
                self._count(booking.shape, 0, 1)
                self._groups[booking.shape].placed[uid] = booking
        if before.shape is not after.shape:
            if after.shape is not None:
                self._count(after.shape, 1, 0)
            if before.shape is not None:
                self._count(before.shape, -1, 0)
        if pending is None and booking is None:
            del self._pods[uid]
        else:
            self._pods[uid] = after
        if before.shape is not None:
            group = self._groups[before.shape]
            if not group.requesting and not group.placed:
                del self._groups[before.shape]

    def _count(self, shape: PodShape, requesting: int, placed: int) -> None:
        group = self._groups.get(shape)
        if group is None:
            group = self._groups[shape] = _Group(self._belonging(shape))
        group.requesting += requesting
        _count(group.belongs, requesting, placed)

    # --- reading -------------------------------------------------------------------------------

    @property
    def quotas(self) -> Mapping[str, QuotaNode]:
        """All quotas in force by name, with the built-in ones but without the tops of trees."""
        self.settle()
        return self._nodes

    @property
    def total_names(self) -> list[str]:
        """The names of the resources that the nodes have."""
        return sorted(name for name, amount in self._total.items() if amount)

    def top(self, tree: str) -> QuotaNode | None:
        """Return the node above all quotas of a tree."""
        self.settle()
        return self._tops.get(tree)

    def tree_of(self, quota: QuotaNode) -> str:
        """Return the id of a quota's tree, "" for the default tree."""
        return self._definitions.tree(quota.definition)

    def of(self, shape: PodShape) -> PodQuota:
        """Return the quota of the pods of a shape."""
        self.settle()
        group = self._groups.get(shape)
        return self._belonging(shape) if group is None else group.belongs

    def pods(self, quota: QuotaNode) -> Iterator[Booking]:
        """Yield the pods with a node that count for a quota itself, not for those below it."""
        self.settle()
        for group in self._groups.values():
            if group.belongs.quota is quota:
                yield from group.placed.values()

    def is_counted(self, belongs: PodQuota) -> bool:
        """Return whether one more pod of a shape must be in the request of its quota already."""
        quota = belongs.quota
        if quota is None:
            return True
        request, used = quota.own.request, quota.own.used
        for name, amount in belongs.requests.items():
            if request[name] < used[name] + amount:
                return False
        return True

    @contextmanager
    def counted(self, belongs: PodQuota) -> Iterator[None]:
        """Have one more pod in the request for a while, unless it must be in it already.

        A pod that is scheduled without being known as pending (a trial) would else be refused,
        because a quota that lends has no more than it requests.
        """
        quota = belongs.quota
        if quota is None or self.is_counted(belongs):
            yield
            return
        quota.add_request(belongs.requests, 1, firm=belongs.firm)
        try:
            yield
        finally:
            quota.add_request(belongs.requests, -1, firm=belongs.firm)

    # --- trees ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Build the trees again if the definitions changed."""
        if not self._stale:
            return
        in_force = self._definitions.in_force
        self._nodes = {}
        self._tops = {}
        self._of_namespace = {}
        self._own_namespace = {}
        self._tree_totals = {}
        self._outside = Counter()
        for definition in sorted(in_force.values(), key=lambda each: each.name):
            for namespace in definition.namespaces:
                self._of_namespace.setdefault(namespace, definition.name)
            if definition.name == definition.namespace:
                self._own_namespace[definition.key] = definition.name
            tree = self._definitions.tree(definition)
            if tree and definition.total is not None and tree not in self._tree_totals:
                self._tree_totals[tree] = definition.total
                if not definition.outside_default:
                    self._outside.update(definition.total)
        for name, most in (
            (DEFAULT_QUOTA, self.settings.default_most),
            (SYSTEM_QUOTA, self.settings.system_most),
        ):
            built_in = in_force.get(name) or _built_in(name, most)
            self._nodes[name] = QuotaNode(built_in, None, self.settings.sharing)
        self._make_top("")
        for name in in_force:
            self._node(name)
        self._stale = False
        for shape, group in self._groups.items():
            group.belongs = self._belonging(shape)
            _count(group.belongs, group.requesting, len(group.placed))

    def _make_top(self, tree: str) -> QuotaNode:
        top = self._tops.get(tree)
        if top is None:
            amounts = self._tree_totals.get(tree, {})
            top = self._tops[tree] = QuotaNode(
                _built_in(ROOT_QUOTA, {}),
                None,
                self.settings.sharing,
                total=(lambda name: amounts.get(name, 0)) if tree else self._default_total,
            )
        return top

    def _default_total(self, name: str) -> int:
        total = self._total.get(name, 0) - self._outside.get(name, 0)
        for built_in in (DEFAULT_QUOTA, SYSTEM_QUOTA):
            total -= self._nodes[built_in].all.used.get(name, 0)
        return total

    def _node(self, name: str) -> QuotaNode | None:
        """Return the node of a quota, made with those above it."""
        known = self._nodes.get(name)
        if known is not None or name == ROOT_QUOTA:
            return known
        definition = self._definitions.in_force[name]
        above = None if definition.parent == ROOT_QUOTA else self._node(definition.parent)
        parent = above or self._make_top(self._definitions.tree(definition))
        node = self._nodes[name] = QuotaNode(definition, parent, self.settings.sharing)
        return node

    def _belonging(self, shape: PodShape) -> PodQuota:
        if ANNOTATION_RESERVE_POD in shape.annotations:
            # The pods that use a reservation count, not the reservation.
            return PodQuota(None, {})
        name = quota_of_pod(
            shape.labels,
            shape.namespace,
            label=LABEL_QUOTA_NAME,
            exists=self._own_namespace,
            of_namespace=self._of_namespace,
            default=DEFAULT_QUOTA if self.settings.default else "",
        )
        quota = self._nodes.get(name) if name else None
        if quota is None and name:
            problem = self._definitions.left_out(name)
            if problem is not None:
                return PodQuota(None, {}, problem=problem)
            quota = self._nodes[DEFAULT_QUOTA] if self.settings.default else None
        if quota is None:
            return PodQuota(None, {})
        requests = shape.requests
        if not self.settings.overhead and shape.spec.overhead:
            overhead = amounts_of(shape.spec.overhead)
            requests = {k: amount - overhead.get(k, 0) for k, amount in requests.items()}
        most = quota.definition.most
        return PodQuota(
            quota,
            {k: amount for k, amount in requests.items() if k in most and amount > 0},
            firm=shape.labels.get(LABEL_PREEMPTIBLE) == "false",
        )


def _count(belongs: PodQuota, requesting: int, placed: int) -> None:
    quota = belongs.quota
    if quota is None:
        return
    if requesting:
        quota.add_request(belongs.requests, requesting, firm=belongs.firm)
    if placed:
        quota.add_used(belongs.requests, placed, firm=belongs.firm)


def _built_in(name: str, most: Amounts) -> QuotaDefinition:
    return QuotaDefinition(
        name=name,
        namespace="",
        parent="" if name == ROOT_QUOTA else ROOT_QUOTA,
        is_parent=name == ROOT_QUOTA,
        tree="",
        lends=name != ROOT_QUOTA,
        least={},
        most=dict(most),
        weight=dict(most),
    )
