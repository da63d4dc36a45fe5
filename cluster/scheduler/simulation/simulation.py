"""One simulation: the scheduler's core over given objects, with time and bindings of its own.

A binding succeeds at once and is seen as the watch would show it: on the pod, with the annotations
that it records. A victim of a preemption is gone at once. Time goes on only where nothing can be
decided otherwise (back-offs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from types import MappingProxyType
from typing import Any, Final

import msgspec

from apis.core import Condition, is_terminated
from apis.decode import canonical_json
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_RESERVATION_ALLOCATED,
    ANNOTATION_RESOURCE_STATUS,
)
from apis.meta import format_time, unix_seconds
from apis.quantity import parse_quantity
from apis.scheduling import ReservationCondition, ReservationPhase, ReservationStatus
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.binding.placement import Bound, Placement
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.configuration.configuration import (
    DEFAULT_SCHEDULER_NAME,
    SchedulerConfiguration,
)
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.cycle.explanations import Explained
from cluster.scheduler.cycle.scheduling import Unplaced
from cluster.scheduler.simulation.claims import claims_of, without_attachments
from cluster.scheduler.simulation.copies import claims_by_name, copy_of
from cluster.scheduler.simulation.objects import FileObject, Progress, tree_of
from cluster.scheduler.simulation.volumes import confirm_volumes
from kube.cache import Cache, Collection
from kube.client import Client
from kube.connection import Connection
from kube.resources import PRIORITY_CLASSES

_QUIET_S: Final = 60.0
"""Simulated seconds without a binding after which nothing more is expected. Chosen: six times
kube-scheduler's longest back-off, and less than its flush of unschedulable pods (five minutes)."""
_EVERY: Final = 500
"""Pods between two reports of progress."""
_ALLOCATIONS: Final = (
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_RESERVATION_ALLOCATED,
)
_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation of a static pod, which kubelet places."""


@dataclass(frozen=True, slots=True)
class PodResult:
    """What happened to one pod.

    state: "placed", "waiting" (for its gang, on `node`), "gated", "unschedulable", or "evicted"
    (for a more important pod). was: the node that it has in the cluster, or "". explained: why.
    """

    pod: str
    state: str
    node: str
    was: str
    message: str
    explained: Explained | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many more of one pod fit. more: the limit was reached first. message: what stops the
    next one."""

    pod: str
    count: int
    more: bool
    nodes: Mapping[str, int]
    message: str
    explained: Explained | None


class Simulation:
    """The writers of a core, and what drives it."""

    def __init__(self, configuration: SchedulerConfiguration, *, seed: int, now: float) -> None:
        """seed: fixes how ties are drawn. now: seconds since 1970."""
        self.now = now
        # A client that is never opened: a request would raise.
        client = Client(Connection("http://simulation.invalid"), user_agent="koordctl")
        # Small seeds differ in a few bits alone, which would rarely change a draw.
        mixed = Random(seed).getrandbits(64)
        self.core = SchedulerCore(client, configuration, self, seed=mixed, clock=lambda: self.now)
        self._placements: list[Placement] = []
        self._reserved: list[ReservationPlacement] = []
        self._explained: dict[str, Explained] = {}
        self._taken = 0
        self._victims: list[str] = []
        self.evicted: dict[str, str] = {}
        """Pods that were evicted for others -> the node that they had."""

    # --- writers -------------------------------------------------------------------------------

    def bind(self, placement: Placement) -> None:
        """Take a placement; it is confirmed after the attempt."""
        self._placements.append(placement)

    def reserve(self, placement: ReservationPlacement) -> None:
        """As `bind`, for a Reservation."""
        self._reserved.append(placement)

    def refuse_reservation(self, *_: Any) -> None:
        """Conditions are not written."""

    def evict(self, victim: Victim, controller: str) -> None:
        """Take a victim; it is gone after the attempt."""
        self._victims.append(f"{victim.namespace}/{victim.name}")

    def status(self, *_: Any) -> None:
        """Conditions are not written: `results` has them."""

    def event(self, *_: Any) -> None:
        """Events are not written."""

    def settled(self, *_: Any) -> None:
        """Nothing waits to be written."""

    # --- input ---------------------------------------------------------------------------------

    def load(self, objects: Iterable[FileObject]) -> tuple[str, ...]:
        """Take the cluster. Returns what is left out, and why; raises InputError for that
        which has no name."""
        by_type: dict[tuple[str, str], list[FileObject]] = {}
        for each in objects:
            by_type.setdefault((each.group, each.kind), []).append(each)
        notes: list[str] = []
        # Pods come last: what a pod's workload is follows from the others.
        for cache in (*self.core.caches, self.core.pods):
            found = by_type.pop((cache.resource.group, cache.resource.kind), [])
            notes += _load(cache, found)
        by_type.pop((PRIORITY_CLASSES.group, PRIORITY_CLASSES.kind), None)
        for (_, kind), left in sorted(by_type.items()):
            notes.append(f"{len(left)} {kind} objects are not read by the scheduler")
        return tuple(notes)

    # --- what happens --------------------------------------------------------------------------

    def run(self, *, progress: Progress = lambda text: None) -> None:
        """Schedule until nothing more happens."""
        core = self.core
        until = self.now + _QUIET_S
        attempts = 0
        while True:
            core.advance(self.now)
            while core.attempts.next(self.now):
                attempts += 1
                if attempts % _EVERY == 0:
                    progress(f"{attempts} attempts, {self._taken} pods placed")
                if self._confirm():
                    until = self.now + _QUIET_S
            if self._confirm():
                until = self.now + _QUIET_S
                continue
            times = (core.queue.next_time(), core.permit.next_time())
            upcoming = min((each for each in times if each is not None), default=None)
            if upcoming is None or upcoming > until:
                return
            # A time that has come already would not let the simulation end.
            self.now = max(upcoming, self.now + 0.001)

    def _confirm(self) -> bool:
        """Bind what was placed, as the API server and the watch would show it, and remove victims.

        Returns whether there was anything."""
        victims, self._victims = self._victims, []
        for key in victims:
            found = self.core.pods.items.get(key)
            self.evicted[key] = "" if found is None else found.spec.node_name
            self.core.pods.drop(key)
        placements, self._placements = self._placements, []
        for placement in placements:
            pod = self.core.pods.get(placement.name, namespace=placement.namespace)
            if pod is None or pod.metadata.uid != placement.uid:
                continue
            explained = self.core.attempts.explanations.get(placement.key)
            if explained is not None:
                self._explained[placement.key] = explained
            self._taken += 1
            confirm_volumes(self.core, placement)
            self.core.attempts.bound(placement, Bound())
            annotations = {
                key: text
                for key, text in pod.metadata.annotations.items()
                if key not in placement.removed_annotations
            }
            moment = format_time(datetime.fromtimestamp(self.now, UTC))
            condition = Condition("PodScheduled", "True", last_transition_time=moment)
            replace = msgspec.structs.replace
            self.core.pods.put(
                replace(
                    pod,
                    metadata=replace(
                        pod.metadata,
                        annotations=annotations | dict(placement.annotations),
                        labels=pod.metadata.labels | dict(placement.labels),
                    ),
                    spec=replace(pod.spec, node_name=placement.node),
                    status=replace(pod.status, conditions=(condition,)),
                )
            )
        return self._confirm_reservations() or bool(placements or victims)

    def _confirm_reservations(self) -> bool:
        """Make Reservations Available that got a node."""
        placements, self._reserved = self._reserved, []
        replace = msgspec.structs.replace
        for placement in placements:
            found = self.core.reservations.get(placement.name)
            if found is None or found.metadata.uid != placement.uid:
                continue
            self._mark(placement)
            self.core.attempts.bound(placement, Bound())
            annotations = {**found.metadata.annotations, **placement.annotations}
            kept = {key: text for key, text in annotations.items() if text is not None}
            self.core.reservations.put(
                replace(
                    found,
                    metadata=replace(found.metadata, annotations=kept),
                    status=self._available(placement),
                )
            )
        return bool(placements)

    def _mark(self, placement: ReservationPlacement) -> None:
        """Mark the pods that a Reservation takes over."""
        replace = msgspec.structs.replace
        uses = canonical_json({"name": placement.name, "uid": placement.uid})
        for taken in placement.takes:
            pod = self.core.pods.get(taken.name, namespace=taken.namespace)
            if pod is not None and pod.metadata.uid == taken.uid:
                annotations = {**pod.metadata.annotations, ANNOTATION_RESERVATION_ALLOCATED: uses}
                metadata = replace(pod.metadata, annotations=annotations)
                self.core.pods.put(replace(pod, metadata=metadata))

    def _available(self, placement: ReservationPlacement) -> ReservationStatus:
        moment = format_time(datetime.fromtimestamp(self.now, UTC))
        scheduled = ReservationCondition("Scheduled", "True", last_transition_time=moment)
        return ReservationStatus(
            phase=ReservationPhase.AVAILABLE,
            node_name=placement.node,
            conditions=(scheduled,),
            allocatable={
                name: parse_quantity(text) for name, text in placement.allocatable.items()
            },
        )

    # --- results -------------------------------------------------------------------------------

    def result(self, key: str, *, was: str = "") -> PodResult:
        """Return what happened to the pod namespace/name."""
        if key in self.evicted:
            return PodResult(key, "evicted", "", was, "evicted for a more important pod", None)
        why = self.core.why(key)
        if why is None:
            raise KeyError(key)
        explained = self._explained.get(key) or self.core.attempts.explanations.get(key)
        states = {"bound": "placed", "has a node": "waiting", "gated": "gated"}
        state = states.get(why["state"], "unschedulable")
        message = "" if state == "placed" else str(why.get("message", ""))
        if state == "waiting" and not message:
            message = "waits on its node for the other members of its gang"
        return PodResult(key, state, why["node"], was, message, explained)

    def capacity(
        self,
        key: str,
        *,
        limit: int,
        claims: Iterable[FileObject] = (),
        progress: Progress = lambda text: None,
    ) -> Capacity:
        """Return how many more pods like namespace/name fit, each on its own.

        The pods stay in the tables. limit: when to stop counting. claims: those that are made for
        the pod; each of the others gets its own. Raises InputError for one that cannot be read.
        """
        namespace, _, name = key.partition("/")
        pod = self.core.pods.get(name, namespace=namespace)
        if pod is None:
            raise KeyError(key)
        # Reports that are too old hold their nodes back.
        self.core.advance(self.now)
        own = claims_by_name(claims)
        shape = self.core.source.shape_of(pod)
        nodes: Counter[str] = Counter()
        for number in range(limit):
            if number % _EVERY == 0 and number:
                progress(f"{number} more {key} fit so far")
            uid = f"{pod.metadata.uid}-{number}"
            if own:
                copy, made = copy_of(pod, number, own)
                for claim in made:
                    self.core.volumes.claims.put(claim)
                shape = self.core.source.shape_of(copy)
            outcome = self.core.scheduling.schedule(
                key=f"{key}-{number}",
                uid=uid,
                shape=shape,
                profile=pod.spec.scheduler_name,
                now=self.now,
            )
            if isinstance(outcome, Unplaced):
                diagnosis = outcome.diagnosis
                explained = Explained(
                    uid,
                    self.now,
                    message=diagnosis.text,
                    counts=diagnosis.counts,
                    nearest=diagnosis.counterfactuals,
                )
                return Capacity(key, number, False, _sorted(nodes), diagnosis.text, explained)
            nodes[outcome.booking.node] += 1
        return Capacity(key, limit, True, _sorted(nodes), "", None)


def _sorted(nodes: Counter[str]) -> Mapping[str, int]:
    """Return the counts, the largest first."""
    return MappingProxyType(dict(sorted(nodes.items(), key=lambda item: (-item[1], item[0]))))


def _load(cache: Cache[Any], found: list[FileObject]) -> list[str]:
    by_key: dict[str, FileObject] = {}
    namespaced = cache.resource.namespaced
    for each in found:
        if namespaced and not each.namespace:
            raise InputError(
                obj=each.ref, field="metadata.namespace", value="", problem="is missing"
            )
        if each.key in by_key:
            raise InputError(
                obj=each.ref,
                field="metadata.name",
                value=each.name,
                problem=f"stands in {by_key[each.key].where} too",
            )
        by_key[each.key] = each
    cache.load({each.key: each.raw for each in found})
    return [
        f"{by_key[key].ref if key in by_key else key} is left out: {problem}"
        for key, problem in cache.undecodable.items()
    ]


def collections_read(configurations: Iterable[SchedulerConfiguration]) -> tuple[Collection, ...]:
    """Return what simulations with these configurations read of a cluster, each once."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], Collection] = {}
    for configuration in configurations:
        core = Simulation(configuration, seed=0, now=0.0).core
        for cache in (*core.caches, core.pods):
            collection = cache.collection
            found[collection.path, tuple(collection.selectors.items())] = collection
    classes = Collection(PRIORITY_CLASSES, PRIORITY_CLASSES.path())
    return (*found.values(), classes)


def moment_of(objects: Iterable[FileObject]) -> float:
    """Return when a dump was made, in seconds since 1970; 0 if nothing in it says so.

    That is the newest report of a NodeMetric, else the newest creation of a pod or node. Measured
    usage would otherwise have expired by the time that the dump is looked at.
    """
    reports, created = 0.0, 0.0
    for each in objects:
        if each.kind == "NodeMetric":
            status = tree_of(each).get("status")
            text = status.get("updateTime") if isinstance(status, dict) else None
            reports = max(reports, _seconds(text))
        elif each.kind in ("Node", "Pod"):
            text = tree_of(each)["metadata"].get("creationTimestamp")
            created = max(created, _seconds(text))
    return reports or created


def _seconds(text: object) -> float:
    return unix_seconds(text) if isinstance(text, str) else 0.0


# --- the whole cluster ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Emptied:
    """A cluster whose pods are to be placed again. moved: key -> the node that each pod has."""

    objects: tuple[FileObject, ...]
    moved: Mapping[str, str]


def emptied(
    objects: Iterable[FileObject], scheduler_names: Iterable[str], *, scheduler_name: str = ""
) -> Emptied:
    """Return the cluster with the pods of these schedulers waiting instead of bound, and their
    volumes attached to no node.

    scheduler_name: given to all pods, whatever they name. Pods of DaemonSets, static pods and pods
    that end stay where they are.
    """
    names = frozenset(scheduler_names)
    result: list[FileObject] = []
    moved: dict[str, str] = {}
    claims: set[str] = set()
    for each in objects:
        is_pod = each.kind == "Pod" and not each.group
        if not is_pod or not _moves(each, names, everything=bool(scheduler_name)):
            result.append(each)
            continue
        tree = tree_of(each)
        meta, spec = tree["metadata"], tree["spec"]
        moved[each.key] = spec.pop("nodeName", "")
        if scheduler_name:
            spec["schedulerName"] = scheduler_name
        annotations = meta.get("annotations") or {}
        meta["annotations"] = {k: v for k, v in annotations.items() if k not in _ALLOCATIONS}
        tree["status"] = {}
        claims |= claims_of(each, spec)
        result.append(
            FileObject(
                each.group,
                each.kind,
                each.namespace,
                each.name,
                msgspec.json.encode(tree),
                each.where,
            )
        )
    return Emptied(without_attachments(result, claims), MappingProxyType(moved))


def _moves(each: FileObject, names: frozenset[str], *, everything: bool) -> bool:
    """Return whether a pod is placed again. One that cannot be read is not: loading names it."""
    try:
        pod = decode_scheduling_pod(each.raw)
    except (msgspec.ValidationError, RecursionError):
        return False
    meta = pod.metadata
    return not (
        is_terminated(pod)
        or meta.deletion_timestamp
        or _MIRROR in meta.annotations
        or any(owner.kind == "DaemonSet" for owner in meta.owner_references)
        or (not everything and (pod.spec.scheduler_name or DEFAULT_SCHEDULER_NAME) not in names)
    )
