"""Reservations in a whole scheduler without an API server: which change helps which pod."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest

from cluster.scheduler.binding.placement import Bound, Refused, Why
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.trial import Trial
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client
from tests.cluster.scheduler.beds.lives import _Binder, _Silent
from tests.cluster.scheduler.extenders.test_lives import _Extender
from tests.cluster.scheduler.reservations.test_lives import _CONFIGURATION, _Writer

_USES = "scheduling.koordinator.sh/reservation-allocated"
_WEB = [{"labelSelector": {"matchLabels": {"app": "web"}}}]


class Bed:
    """A process whose objects come from the test. One node of 4 CPUs."""

    def __init__(self, configuration: SchedulerConfiguration = _CONFIGURATION) -> None:
        self.now = 1_800_000_000.0

        async def make() -> SchedulerProcess:
            return SchedulerProcess(
                cast(Client, None), configuration, seed=3, clock=lambda: self.now
            )

        self.process = asyncio.run(make())
        self.binder, self.writer = _Binder(), _Writer()
        self.process.binder = self.binder  # type: ignore[assignment]
        self.process.reservation_writer = self.writer  # type: ignore[assignment]
        self.process.statuses = _Silent()  # type: ignore[assignment]
        self.process.events = _Silent()  # type: ignore[assignment]
        self.evicted: list[str] = []
        self.process.evict = (  # type: ignore[method-assign]
            lambda victim, controller: self.evicted.append(victim.name)
        )
        self._version = 0
        amounts = {"cpu": "4", "memory": "64Gi", "pods": "10"}
        node = {"metadata": {"name": "n"}, "status": {"allocatable": amounts}}
        self.process.nodes.take(self._line(node))

    def _line(self, obj: dict[str, Any], kind: str = "MODIFIED") -> bytes:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        return msgspec.json.encode({"type": kind, "object": obj})

    def pod(
        self,
        name: str,
        cpu: str,
        *,
        kind: str = "MODIFIED",
        metadata: dict[str, Any] | None = None,
        node: str = "",
        ready: bool = False,
        priority: int = 0,
    ) -> None:
        status: dict[str, Any] = {}
        if ready:
            conditions = [{"type": "Ready", "status": "True"}]
            status = {"phase": "Running", "conditions": conditions}
        resources = {"requests": {"cpu": cpu}}
        obj = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                **(metadata or {}),
            },
            "spec": {
                "schedulerName": "koord-scheduler",
                "nodeName": node,
                "priority": priority,
                "containers": [{"name": "c", "resources": resources}],
            },
            "status": status,
        }
        self.process.pods.take(self._line(obj, kind))

    def reservation(self, name: str, cpu: str, *, kind: str = "MODIFIED", **members: Any) -> None:
        status = {
            "phase": "Available",
            "nodeName": "n",
            "allocatable": {"cpu": cpu},
            **members.pop("status", {}),
        }
        obj = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "labels": members.pop("labels", {}),
                **members.pop("metadata", {}),
            },
            "spec": {
                "template": {"spec": {"schedulerName": "koord-scheduler", "containers": []}},
                "owners": _WEB,
                "ttl": "1h",
                **members,
            },
            "status": status,
        }
        self.process.reservations.take(self._line(obj, kind))

    def placed(self) -> dict[str, str]:
        """Schedule; return the name of the reservation of each pod that was placed, or ""."""
        self.now += 20.0
        self.process.schedule_for(10.0)
        result = {}
        while self.binder.waiting:
            placement = self.binder.waiting.popleft()
            text = placement.annotations.get(_USES)
            result[placement.name] = json.loads(text)["name"] if text else ""
        return result


_OWNER = {"labels": {"app": "web"}}


def test_a_pod_that_is_a_reservation_gives_way_to_its_owner_once_it_is_ready() -> None:
    bed = Bed()
    mode = {
        "labels": {"scheduling.koordinator.sh/operating-mode": "Reservation"},
        "annotations": {"scheduling.koordinator.sh/reservation-owners": json.dumps(_WEB)},
    }
    bed.pod("keeps", "3", metadata=mode, node="n")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {}
    bed.pod("keeps", "3", metadata=mode, node="n", ready=True)
    assert bed.placed() == {"web": "keeps"}
    bed.pod("web-2", "3", metadata=_OWNER)
    assert bed.placed() == {}


def test_a_waiting_pod_is_tried_when_a_reservation_comes_opens_or_ends() -> None:
    bed = Bed()
    bed.reservation("r", "3", owners=[{"object": {"name": "another"}}])
    bed.pod("web", "3", metadata=_OWNER)
    bed.pod("other", "2")
    assert bed.placed() == {}
    bed.reservation("r", "3", unschedulable=True)
    assert bed.placed() == {}
    bed.reservation("r", "3")
    assert bed.placed() == {"web": "r"}
    bed.pod("web", "3", metadata=_OWNER, kind="DELETED")
    assert bed.placed() == {}
    bed.reservation("r", "3", status={"phase": "Failed"})
    assert bed.placed() == {"other": ""}


def test_an_extender_is_asked_about_the_node_of_a_reservation_that_names_the_pod() -> None:
    bed = Bed()
    attempts = bed.process.attempts
    attempts.consultant = _Extender()
    bed.reservation("r", "3", owners=[{"object": {"name": "web"}}])
    bed.pod("web", "3")
    assert bed.placed() == {}
    assert attempts.candidates("uid-web") == ("n",)
    attempts.consulted("uid-web", None)
    assert bed.placed() == {"web": "r"}


def test_an_extender_is_sent_the_reserve_pod_of_a_reservation() -> None:
    bed = Bed()
    attempts = bed.process.attempts
    attempts.consultant = _Extender()
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "1500m"}}}],
    }
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template={"spec": spec}, status=pending)
    assert bed.placed() == {}
    assert attempts.candidates("uid-r") == ("n",)
    raw = attempts.in_memory("uid-r")
    assert raw is not None
    pod = json.loads(raw)
    assert pod["metadata"]["uid"] == "uid-r"
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "1500m"}
    assert attempts.in_memory("uid-web") is None
    attempts.consulted("uid-r", None)
    assert [placement.name for placement in bed.writer.waiting] == ["r"]


_BAD_EDITS: list[dict[str, Any]] = [
    {"owners": []},
    {"template": {"spec": {"schedulerName": "koord-scheduler", "priority": "x"}}},
]


@pytest.mark.parametrize("edit", _BAD_EDITS)
@pytest.mark.parametrize("outcome", ["bound", "refused", "deleted", "ended"])
def test_a_bad_edit_of_a_reservation_that_is_being_bound_gives_nobody_its_room(
    edit: dict[str, Any], outcome: str
) -> None:
    bed = Bed()
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}],
    }
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template={"spec": spec}, status=pending)
    assert bed.placed() == {}
    placement = bed.writer.waiting.pop()
    changed = {"template": {"spec": spec}, "status": pending, **edit}
    bed.reservation("r", "3", **changed)
    assert "uid-r" in bed.process.reservation_source.problems
    bed.pod("other", "2")
    assert bed.placed() == {}
    if outcome == "bound":
        bed.process.attempts.bound(placement, Bound())
        # An older state may come late.
        bed.reservation("r", "3", **changed)
        bed.pod("more", "2")
        assert bed.placed() == {}
        bed.reservation("r", "3", **{**changed, "status": {}})
        assert bed.placed() == {}
        assert bed.process.tables.bookings["uid-r"].node == "n"
        return
    if outcome == "refused":
        # What is refused during the binding is not written.
        bed.writer.refused.clear()
        bed.process.attempts.bound(placement, Refused(Why.CONFLICT, "edited"))
        assert next(iter(edit)) in bed.writer.refused["uid-r"]
    elif outcome == "deleted":
        bed.reservation("r", "3", kind="DELETED", **changed)
    else:
        bed.reservation("r", "3", **{**changed, "status": {**pending, "phase": "Failed"}})
    assert bed.placed() == {"other": ""}
    assert bed.process.queue.place("uid-r") is None
    if outcome == "refused":
        # Corrected, it waits for room again.
        bed.reservation("r", "3", template={"spec": spec}, status=pending)
        assert bed.process.queue.place("uid-r") is not None
        bed.pod("other", "2", kind="DELETED")
        assert bed.placed() == {}
        assert [each.name for each in bed.writer.waiting] == ["r"]


def test_who_uses_a_reservation_wakes_no_pod() -> None:
    bed = Bed()
    bed.reservation("r", "3", allocateOnce=False)
    bed.pod("large", "2")
    assert bed.placed() == {}
    attempts = bed.process.queue.order("uid-large")
    bed.reservation("r", "3", allocateOnce=False, status={"currentOwners": [{"name": "x"}]})
    assert bed.placed() == {}
    assert bed.process.queue.order("uid-large") == attempts


def test_a_reservation_that_is_deleted_while_a_pod_is_bound_to_use_it() -> None:
    bed = Bed()
    bed.reservation("r", "3")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {"web": "r"}
    bed.reservation("r", "3", kind="DELETED")
    bed.pod("other", "2")
    assert bed.placed() == {}
    uses = {"annotations": {_USES: '{"name":"r","uid":"uid-r"}'}, **_OWNER}
    bed.pod("web", "3", metadata=uses, node="n")
    nodes = bed.process.tables.nodes
    assert int(nodes.requested[nodes.row("n"), 0]) == 3000
    bed.pod("web", "3", metadata=uses, node="n", kind="DELETED")
    assert bed.placed() == {"other": ""}
    assert not len(bed.process.tables.reservations)


_PREEMPTS = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    postFilter: {enabled: [{name: Reservation}], disabled: [{name: %s}]}
    reserve: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
  pluginConfig:
  - name: Reservation
    args: {enablePreemption: %s}
"""


@pytest.mark.parametrize("other", ["DefaultPreemption", "none"])
@pytest.mark.parametrize("enabled", [True, False])
def test_pods_are_evicted_for_reservations_where_that_is_enabled(enabled: bool, other: str) -> None:
    disabled = "DefaultPreemption" if other == "none" else "ImageLocality"
    text = _PREEMPTS % (disabled, str(enabled).lower())
    bed = Bed(read_configuration(text, obj="test"))
    protected = {"labels": {"scheduling.koordinator.sh/disable-preemptible": "true"}}
    bed.pod("protected", "1", node="n", metadata=protected)
    bed.pod("victim", "2", node="n")
    resources = {"requests": {"cpu": "3"}}
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "c", "resources": resources}],
    }
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template={"spec": spec}, status=pending)
    assert bed.placed() == {}
    assert bed.evicted == (["victim"] if enabled else [])
    assert "Insufficient cpu" in bed.writer.refused["uid-r"]
    if enabled:
        # The room is the reservation's, not a less important pod's.
        bed.pod("victim", "2", node="n", kind="DELETED")
        bed.pod("late", "1", priority=10)
        assert bed.placed() == {}
        assert [placement.name for placement in bed.writer.waiting] == ["r"]


def test_a_reservation_is_never_a_victim() -> None:
    bed = Bed(read_configuration(_PREEMPTS % ("ImageLocality", "true"), obj="test"))
    spec = {"schedulerName": "koord-scheduler", "priority": -5, "containers": []}
    bed.reservation("r", "3", template={"spec": spec})
    bed.pod("important", "3", priority=1000)
    assert bed.placed() == {}
    assert bed.evicted == []


# --- pre-allocation ------------------------------------------------------------------------------


def _pending(cpu: str, **spec: Any) -> dict[str, Any]:
    """Return the members of a Reservation without a node, with more of its template's spec."""
    resources = {"requests": {"cpu": cpu}}
    containers = [{"name": "c", "resources": resources}]
    template = {"schedulerName": "koord-scheduler", "containers": containers, **spec}
    status = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    return {"template": {"spec": template}, "status": status}


def test_a_reservation_with_a_finalizer_that_is_deleted_before_its_binding_keeps_no_room() -> None:
    bed = Bed()
    bed.reservation("r", "3", **_pending("3"))
    bed.pod("other", "2")
    assert bed.placed() == {}
    placement = bed.writer.waiting.popleft()
    # The watch shows the deletion; the object stays, and never gets a node.
    deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    bed.reservation("r", "3", metadata=deleted, **_pending("3"))
    assert bed.placed() == {}
    bed.process.attempts.bound(placement, Refused(Why.DELETED, "being deleted"))
    assert not bed.process.tables.bookings
    assert bed.placed() == {"other": ""}


def test_a_reservation_whose_template_has_scheduling_gates_says_why_it_waits() -> None:
    bed = Bed()
    bed.reservation("r", "3", **_pending("3", schedulingGates=[{"name": "example.com/gate"}]))
    assert bed.placed() == {}
    assert not bed.writer.waiting
    assert "[example.com/gate]" in bed.writer.refused["uid-r"]


def _pre_allocate(bed: Bed, name: str, cpu: str, **members: Any) -> None:
    """Make a pending Reservation that takes over room of running pods with the label app: web."""
    wanted: dict[str, Any] = {
        "preAllocation": True,
        "allocatePolicy": "Restricted",
        "allocateOnce": False,
    }
    bed.reservation(name, cpu, **{**wanted, **_pending(cpu), **members})


def _requested(bed: Bed) -> int:
    nodes = bed.process.tables.nodes
    return int(nodes.requested[nodes.row("n"), 0])


def _taken(bed: Bed) -> list[list[str]]:
    """Schedule; return the pods that each placed Reservation takes over."""
    assert bed.placed() == {}
    return [[pod.name for pod in placement.takes] for placement in bed.writer.waiting]


def test_a_reservation_takes_over_the_room_of_a_running_pod_and_keeps_it() -> None:
    bed = Bed()
    bed.pod("old", "3", node="n", metadata=_OWNER)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    assert _requested(bed) == 3000
    bed.reservation("r", "3", allocatePolicy="Restricted", allocateOnce=False)
    assert _requested(bed) == 3000
    uses = {"annotations": {_USES: '{"name":"r","uid":"uid-r"}'}, **_OWNER}
    bed.pod("old", "3", node="n", metadata=uses)
    assert _requested(bed) == 3000
    # The pod goes; what it had stays the reservation's, for its owners alone.
    bed.pod("old", "3", node="n", metadata=uses, kind="DELETED")
    assert _requested(bed) == 3000
    bed.pod("stranger", "2")
    bed.pod("new", "2", metadata=_OWNER)
    assert bed.placed() == {"new": "r"}


def test_a_binding_that_fails_gives_pods_back_as_they_were() -> None:
    bed = Bed()
    bed.pod("old", "3", node="n", metadata=_OWNER)
    before = dict(bed.process.tables.bookings)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    bed.process.attempts.bound(bed.writer.waiting.popleft(), Refused(Why.FAILING, "test"))
    assert dict(bed.process.tables.bookings) == before
    assert not bed.process.tables._taken


def test_a_trial_without_a_pod_that_is_taken_over_leaves_it_as_it_was() -> None:
    bed = Bed()
    tables = bed.process.tables
    bed.pod("old", "3", node="n", metadata=_OWNER)
    before = dict(tables.bookings)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    with Trial(tables) as trial:
        trial.remove("uid-old")
    bed.process.attempts.bound(bed.writer.waiting.popleft(), Refused(Why.FAILING, "test"))
    assert dict(tables.bookings) == before


_MULTIPLE = {"preAllocationPolicy": {"enableMultiple": True}}


@pytest.mark.parametrize(
    ("pods", "cpu", "members", "takes"),
    [
        # Too large for the reservation, or too small to help.
        ([("a", "4")], "3", {}, None),
        ([("a", "1"), ("b", "3")], "2", {}, None),
        # The one that fills the reservation best; the room of one is enough.
        ([("a", "1"), ("b", "2")], "2", {}, ["b"]),
        ([("a", "2"), ("b", "2")], "4", {}, None),
        (
            [("a", "2"), ("b", "2")],
            "4",
            {**_MULTIPLE},
            ["a", "b"],
        ),
        ([("a", "1"), ("b", "2")], "3", _MULTIPLE, ["b"]),
        # Free room serves where no pod does, unless the label forbids it.
        ([], "3", {}, []),
        ([], "3", {"required": True}, None),
        ([("a", "2")], "2", {"required": True}, ["a"]),
        # Others' pods are not taken.
        ([("a", "3")], "3", {"owners": [{"labelSelector": {"matchLabels": {"app": "db"}}}]}, None),
    ],
)
def test_which_pods_are_taken_over(
    pods: list[tuple[str, str]], cpu: str, members: dict[str, Any], takes: list[str] | None
) -> None:
    bed = Bed()
    for name, wanted in pods:
        bed.pod(name, wanted, node="n", metadata=_OWNER)
    required = {"scheduling.koordinator.sh/pre-allocation-required": "true"}
    if members.pop("required", False):
        members = {**members, "labels": required}
    _pre_allocate(bed, "r", cpu, **members)
    assert _taken(bed) == ([] if takes is None else [takes])
    if takes is None:
        assert "0/1 nodes are available" in bed.writer.refused["uid-r"]


def test_two_reservations_do_not_take_one_pod() -> None:
    bed = Bed()
    bed.pod("a", "2", node="n", metadata=_OWNER)
    bed.pod("b", "2", node="n", metadata=_OWNER)
    _pre_allocate(bed, "r", "2")
    _pre_allocate(bed, "s", "2")
    _pre_allocate(bed, "t", "2")
    assert sorted(_taken(bed)) == [["a"], ["b"]]
    assert _requested(bed) == 4000


_CLUSTER = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    reserve: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
  pluginConfig:
  - name: Reservation
    args:
      preAllocationConfig: {enableClusterMode: %s, preferNoPreAllocatedPods: true}
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_cluster_mode_takes_labelled_pods_by_their_priority(enabled: bool) -> None:
    text = _CLUSTER % str(enabled).lower()
    bed = Bed(read_configuration(text, obj="test"))
    label = {"pod.koordinator.sh/is-pre-allocatable": "true"}
    key = "pod.koordinator.sh/pre-allocatable-priority"
    for name, priority in (("low", "-1"), ("high", "7"), ("none", "x")):
        bed.pod(name, "1", node="n", metadata={"labels": label, "annotations": {key: priority}})
    bed.pod("plain", "1", node="n", metadata=_OWNER)
    policy = {"mode": "Cluster"}
    _pre_allocate(bed, "r", "1", preAllocationPolicy=policy)
    assert _taken(bed) == ([["high"]] if enabled else [])
    if not enabled:
        assert "preAllocationPolicy" in bed.writer.refused["uid-r"]
        return
    # With free room on the node, that comes first under this configuration.
    bed.pod("plain", "1", node="n", metadata=_OWNER, kind="DELETED")
    _pre_allocate(bed, "s", "1", preAllocationPolicy=policy)
    assert _taken(bed) == [["high"], []]
