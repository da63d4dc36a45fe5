"""Reservations in a whole scheduler without an API server: which change helps which pod."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.scheduler.binding.placement import Bound, Refused, Why
from cluster.scheduler.cycle.trial import Trial
from tests.cluster.scheduler.beds.extender import Extender
from tests.cluster.scheduler.reservations.bed import USES, WEB, ReservationBed

_OWNER = {"labels": {"app": "web"}}


def test_a_pod_that_is_a_reservation_gives_way_to_its_owner_once_it_is_ready() -> None:
    bed = ReservationBed()
    mode = {
        "labels": {"scheduling.koordinator.sh/operating-mode": "Reservation"},
        "annotations": {"scheduling.koordinator.sh/reservation-owners": json.dumps(WEB)},
    }
    bed.pod("keeps", "3", metadata=mode, node="n")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {}
    bed.pod("keeps", "3", metadata=mode, node="n", ready=True)
    assert bed.placed() == {"web": "keeps"}
    bed.pod("web-2", "3", metadata=_OWNER)
    assert bed.placed() == {}


def test_a_waiting_pod_is_tried_when_a_reservation_comes_opens_or_ends() -> None:
    bed = ReservationBed()
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
    bed = ReservationBed()
    attempts = bed.core.attempts
    attempts.consultant = Extender(asks_nodes="koord-scheduler")
    bed.reservation("r", "3", owners=[{"object": {"name": "web"}}])
    bed.pod("web", "3")
    assert bed.placed() == {}
    assert attempts.candidates("uid-web") == ("n",)
    attempts.consulted("uid-web", None)
    assert bed.placed() == {"web": "r"}


def test_an_extender_is_sent_the_reserve_pod_of_a_reservation() -> None:
    bed = ReservationBed()
    attempts = bed.core.attempts
    attempts.consultant = Extender(asks_nodes="koord-scheduler")
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
    assert [placement.name for placement in bed.reserved] == ["r"]


_BAD_EDITS: list[dict[str, Any]] = [
    {"owners": []},
    {"template": {"spec": {"schedulerName": "koord-scheduler", "priority": "x"}}},
]


@pytest.mark.parametrize("edit", _BAD_EDITS)
@pytest.mark.parametrize("outcome", ["bound", "refused", "deleted", "ended"])
def test_a_bad_edit_of_a_reservation_that_is_being_bound_gives_no_pod_its_room(
    edit: dict[str, Any], outcome: str
) -> None:
    bed = ReservationBed()
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}],
    }
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template={"spec": spec}, status=pending)
    assert bed.placed() == {}
    placement = bed.reserved.pop()
    changed = {"template": {"spec": spec}, "status": pending, **edit}
    bed.reservation("r", "3", **changed)
    assert "uid-r" in bed.core.reservation_source.problems
    bed.pod("other", "2")
    assert bed.placed() == {}
    if outcome == "bound":
        bed.core.attempts.bound(placement, Bound())
        # An older state may come late.
        bed.reservation("r", "3", **changed)
        bed.pod("more", "2")
        assert bed.placed() == {}
        bed.reservation("r", "3", **{**changed, "status": {}})
        assert bed.placed() == {}
        assert bed.core.tables.bookings["uid-r"].node == "n"
        return
    if outcome == "refused":
        # What is refused during the binding is not written.
        bed.refused.clear()
        bed.core.attempts.bound(placement, Refused(Why.CONFLICT, "edited"))
        assert next(iter(edit)) in bed.refused["uid-r"]
    elif outcome == "deleted":
        bed.reservation("r", "3", kind="DELETED", **changed)
    else:
        bed.reservation("r", "3", **{**changed, "status": {**pending, "phase": "Failed"}})
    assert bed.placed() == {"other": ""}
    assert bed.core.queue.state_of("uid-r") is None
    if outcome == "refused":
        # Corrected, it waits for room again.
        bed.reservation("r", "3", template={"spec": spec}, status=pending)
        assert bed.core.queue.state_of("uid-r") is not None
        bed.pod("other", "2", kind="DELETED")
        assert bed.placed() == {}
        assert [each.name for each in bed.reserved] == ["r"]


def test_who_uses_a_reservation_wakes_no_pod() -> None:
    bed = ReservationBed()
    bed.reservation("r", "3", allocateOnce=False)
    bed.pod("large", "2")
    assert bed.placed() == {}
    attempts = bed.core.queue.order("uid-large")
    bed.reservation("r", "3", allocateOnce=False, status={"currentOwners": [{"name": "x"}]})
    assert bed.placed() == {}
    assert bed.core.queue.order("uid-large") == attempts


def test_a_reservation_that_is_deleted_while_a_pod_is_bound_to_use_it() -> None:
    bed = ReservationBed()
    bed.reservation("r", "3")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {"web": "r"}
    bed.reservation("r", "3", kind="DELETED")
    bed.pod("other", "2")
    assert bed.placed() == {}
    uses = {"annotations": {USES: '{"name":"r","uid":"uid-r"}'}, **_OWNER}
    bed.pod("web", "3", metadata=uses, node="n")
    nodes = bed.core.tables.nodes
    assert int(nodes.requested[nodes.row("n"), 0]) == 3000
    bed.pod("web", "3", metadata=uses, node="n", kind="DELETED")
    assert bed.placed() == {"other": ""}
    assert not len(bed.core.tables.reservations)


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
    bed = ReservationBed(text)
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
    assert bed.evicted() == (["victim"] if enabled else [])
    assert "Insufficient cpu" in bed.refused["uid-r"]
    if enabled:
        # The room is the reservation's, not a less important pod's.
        bed.pod("victim", "2", node="n", kind="DELETED")
        bed.pod("late", "1", priority=10)
        assert bed.placed() == {}
        assert [placement.name for placement in bed.reserved] == ["r"]


def test_a_reservation_is_never_a_victim() -> None:
    bed = ReservationBed(_PREEMPTS % ("ImageLocality", "true"))
    spec = {"schedulerName": "koord-scheduler", "priority": -5, "containers": []}
    bed.reservation("r", "3", template={"spec": spec})
    bed.pod("important", "3", priority=1000)
    assert bed.placed() == {}
    assert bed.evicted() == []


# --- pre-allocation ------------------------------------------------------------------------------


def _pending(cpu: str, **spec: Any) -> dict[str, Any]:
    """Return the members of a Reservation without a node, with more of its template's spec."""
    resources = {"requests": {"cpu": cpu}}
    containers = [{"name": "c", "resources": resources}]
    template = {"schedulerName": "koord-scheduler", "containers": containers, **spec}
    status = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    return {"template": {"spec": template}, "status": status}


def test_a_reservation_with_a_finalizer_that_is_deleted_before_its_binding_keeps_no_room() -> None:
    bed = ReservationBed()
    bed.reservation("r", "3", **_pending("3"))
    bed.pod("other", "2")
    assert bed.placed() == {}
    placement = bed.reserved.pop(0)
    # The watch shows the deletion; the object stays, and never gets a node.
    deleted = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    bed.reservation("r", "3", metadata=deleted, **_pending("3"))
    assert bed.placed() == {}
    bed.core.attempts.bound(placement, Refused(Why.DELETED, "being deleted"))
    assert not bed.core.tables.bookings
    assert bed.placed() == {"other": ""}


def test_a_reservation_whose_template_has_scheduling_gates_says_why_it_waits() -> None:
    bed = ReservationBed()
    bed.reservation("r", "3", **_pending("3", schedulingGates=[{"name": "example.com/gate"}]))
    assert bed.placed() == {}
    assert not bed.reserved
    assert "[example.com/gate]" in bed.refused["uid-r"]


def _pre_allocate(bed: ReservationBed, name: str, cpu: str, **members: Any) -> None:
    """Make a pending Reservation that takes over room of running pods with the label app: web."""
    wanted: dict[str, Any] = {
        "preAllocation": True,
        "allocatePolicy": "Restricted",
        "allocateOnce": False,
    }
    bed.reservation(name, cpu, **{**wanted, **_pending(cpu), **members})


def _requested(bed: ReservationBed) -> int:
    nodes = bed.core.tables.nodes
    return int(nodes.requested[nodes.row("n"), 0])


def _taken(bed: ReservationBed) -> list[list[str]]:
    """Schedule; return the pods that each placed Reservation takes over."""
    assert bed.placed() == {}
    return [[pod.name for pod in placement.takes] for placement in bed.reserved]


def test_a_reservation_takes_over_the_room_of_a_running_pod_and_keeps_it() -> None:
    bed = ReservationBed()
    bed.pod("old", "3", node="n", metadata=_OWNER)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    assert _requested(bed) == 3000
    bed.reservation("r", "3", allocatePolicy="Restricted", allocateOnce=False)
    assert _requested(bed) == 3000
    uses = {"annotations": {USES: '{"name":"r","uid":"uid-r"}'}, **_OWNER}
    bed.pod("old", "3", node="n", metadata=uses)
    assert _requested(bed) == 3000
    # The pod goes; what it had stays the reservation's, for its owners alone.
    bed.pod("old", "3", node="n", metadata=uses, kind="DELETED")
    assert _requested(bed) == 3000
    bed.pod("stranger", "2")
    bed.pod("new", "2", metadata=_OWNER)
    assert bed.placed() == {"new": "r"}


def test_a_binding_that_fails_gives_pods_back_as_they_were() -> None:
    bed = ReservationBed()
    bed.pod("old", "3", node="n", metadata=_OWNER)
    before = dict(bed.core.tables.bookings)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    bed.core.attempts.bound(bed.reserved.pop(0), Refused(Why.FAILING, "test"))
    assert dict(bed.core.tables.bookings) == before
    assert not bed.core.tables._taken


def test_a_trial_without_a_pod_that_is_taken_over_leaves_it_as_it_was() -> None:
    bed = ReservationBed()
    tables = bed.core.tables
    bed.pod("old", "3", node="n", metadata=_OWNER)
    before = dict(tables.bookings)
    _pre_allocate(bed, "r", "3")
    assert _taken(bed) == [["old"]]
    with Trial(tables) as trial:
        trial.remove("uid-old")
    bed.core.attempts.bound(bed.reserved.pop(0), Refused(Why.FAILING, "test"))
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
    bed = ReservationBed()
    for name, wanted in pods:
        bed.pod(name, wanted, node="n", metadata=_OWNER)
    required = {"scheduling.koordinator.sh/pre-allocation-required": "true"}
    if members.pop("required", False):
        members = {**members, "labels": required}
    _pre_allocate(bed, "r", cpu, **members)
    assert _taken(bed) == ([] if takes is None else [takes])
    if takes is None:
        assert "0/1 nodes are available" in bed.refused["uid-r"]


@pytest.mark.parametrize("required", [True, False])
def test_a_reservation_is_tried_when_a_pod_comes_whose_room_it_may_take(required: bool) -> None:
    bed = ReservationBed()
    if not required:
        # It has the room, and becomes one of the owners by its labels.
        bed.pod("old", "3", node="n")
    labels = {"scheduling.koordinator.sh/pre-allocation-required": "true"} if required else {}
    _pre_allocate(bed, "r", "3", labels=labels)
    assert _taken(bed) == []
    assert "0/1 nodes are available" in bed.refused["uid-r"]
    bed.now += 15
    bed.pod("old", "3", node="n", metadata=_OWNER)
    assert _taken(bed) == [["old"]]


def test_two_reservations_do_not_take_one_pod() -> None:
    bed = ReservationBed()
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
    bed = ReservationBed(text)
    label = {"pod.koordinator.sh/is-pre-allocatable": "true"}
    key = "pod.koordinator.sh/pre-allocatable-priority"
    for name, priority in (("low", "-1"), ("high", "7"), ("none", "x")):
        bed.pod(name, "1", node="n", metadata={"labels": label, "annotations": {key: priority}})
    bed.pod("plain", "1", node="n", metadata=_OWNER)
    policy = {"mode": "Cluster"}
    _pre_allocate(bed, "r", "1", preAllocationPolicy=policy)
    assert _taken(bed) == ([["high"]] if enabled else [])
    if not enabled:
        assert "preAllocationPolicy" in bed.refused["uid-r"]
        return
    # With free room on the node, that comes first under this configuration.
    bed.pod("plain", "1", node="n", metadata=_OWNER, kind="DELETED")
    _pre_allocate(bed, "s", "1", preAllocationPolicy=policy)
    assert _taken(bed) == [["high"], []]
