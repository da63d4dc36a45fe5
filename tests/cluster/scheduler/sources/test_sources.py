"""Which changes of pods and nodes concern pods that wait."""

from __future__ import annotations

import msgspec
import pytest

from apis.core import Condition
from apis.quantity import Quantity
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.events import Action
from cluster.scheduler.sources.bookings import booking_of, reservation_of
from cluster.scheduler.sources.cluster import node_actions, pod_actions
from cluster.scheduler.sources.objects import int32_of, kept_node, kept_pod
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_node, make_pod

_PREFIX = "scheduling.koordinator.sh"


def test_a_heartbeat_of_a_node_concerns_no_pod() -> None:
    assert not node_actions(make_node("n"), make_node("n"))


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"allocatable": {"cpu": "17"}}, Action.UPDATE_NODE_ALLOCATABLE),
        ({"labels": {"a": "b"}}, Action.UPDATE_NODE_LABEL),
        ({"annotations": {"a": "b"}}, Action.UPDATE_NODE_ANNOTATION),
        ({"taints": [{"key": "a", "effect": "NoSchedule"}]}, Action.UPDATE_NODE_TAINT),
        ({"unschedulable": True}, Action.UPDATE_NODE_TAINT),
        ({"images": [{"names": ["a"], "sizeBytes": 1}]}, Action.UPDATE_OTHER),
    ],
)
def test_changes_of_a_node(change: dict[str, object], action: Action) -> None:
    assert node_actions(make_node("n"), make_node("n", **change)) == action  # type: ignore[arg-type]


def _with_status(pod: SchedulingPod, **status: str) -> SchedulingPod:
    return msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, **status))


def test_a_new_status_of_a_bound_pod_concerns_no_pod() -> None:
    pod = make_pod("p", node="n")
    assert not pod_actions(pod, _with_status(pod, phase="Running"))
    assert pod_actions(pod, make_pod("p", node="n", labels={"a": "b"})) == Action.UPDATE_POD_LABEL


def test_an_annotation_that_cannot_be_read_costs_its_own_part_of_the_booking() -> None:
    pod = make_pod(
        "p",
        node="n",
        annotations={
            f"{_PREFIX}/resource-status": '{"cpuset":"0-x"}',
            f"{_PREFIX}/device-allocated": '{"gpu":[{"minor":3}]}',
            f"{_PREFIX}/reservation-allocated": "[]",
        },
    )
    read = booking_of(pod, Shapes().of(pod))
    assert not read.booking.allocation.cpus
    assert [device.minor for device in read.booking.allocation.devices["gpu"]] == [3]
    assert len(read.problems) == 2
    assert all("Pod default/p" in str(problem) for problem in read.problems)


def test_a_huge_annotation_is_dropped_before_the_pod_is_kept() -> None:
    pod = make_pod("p", annotations={f"{_PREFIX}/a": "x" * 2**20, f"{_PREFIX}/b": "y"})
    assert kept_pod(pod).metadata.annotations == {f"{_PREFIX}/b": "y"}


@pytest.mark.parametrize(
    ("annotation", "cpu"),
    [
        pytest.param('{"resources":{"cpu":"3","memory":"1Gi"}}', 13000, id="amounts"),
        pytest.param('{"resources":{"cpu":"3"},"reservedCPUs":"0-4"}', 11000, id="CPUs win"),
        pytest.param('{"resources":{"cpu":"99"}}', 0, id="never below nothing"),
        pytest.param(
            '{"reservedCPUs":"0-4","applyPolicy":"ReservedCPUsOnly"}', 16000, id="only CPUs"
        ),
        pytest.param('{"reservedCPUs":"x"}', 16000, id="unreadable"),
    ],
)
def test_what_a_node_reserves_is_not_allocatable(annotation: str, cpu: int) -> None:
    node = make_node(
        "n",
        annotations={"node.koordinator.sh/reservation": annotation},
        allocatable={"kubernetes.io/batch-cpu": "5000"},
    )
    allocatable = kept_node(node).status.allocatable
    assert allocatable["cpu"].milli_value() == cpu
    assert allocatable["kubernetes.io/batch-cpu"].value() == 5000


def test_old_resource_names_become_the_present_ones() -> None:
    old, present = "koordinator.sh/batch-cpu", "kubernetes.io/batch-cpu"
    node = kept_node(make_node("n", allocatable={old: "9"}))
    assert old not in node.status.allocatable
    assert node.status.allocatable[present].value() == 9
    pod = kept_pod(make_pod("p", requests={old: "1"}, limits={old: "2", present: "3"}))
    shape = Shapes().of(pod)
    assert shape.requests == {present: 1}
    assert shape.limits == {present: 3}


def test_a_label_names_another_scheduler_than_the_spec() -> None:
    label = {f"{_PREFIX}/scheduler-name": "koord-scheduler"}
    pod = make_pod("p", labels=label, schedulerName="default-scheduler")
    assert kept_pod(pod).spec.scheduler_name == "koord-scheduler"


def _condition(
    *,
    kind: str = "DisruptionTarget",
    status: str = "True",
    reason: str = "PreemptionByScheduler",
) -> Condition:
    return Condition(type=kind, status=status, reason=reason)


@pytest.mark.parametrize(
    ("deleting", "condition", "preempted"),
    [
        (True, _condition(), True),
        (False, _condition(), False),
        (True, _condition(status="False"), False),
        (True, _condition(reason="EvictionByEvictionAPI"), False),
        (True, _condition(kind="Ready"), False),
    ],
)
def test_a_pod_is_preempted_while_it_is_being_deleted_for_that_reason(
    deleting: bool, condition: Condition, preempted: bool
) -> None:
    pod = make_pod("p", node="n")
    meta = pod.metadata
    if deleting:
        meta = msgspec.structs.replace(meta, deletion_timestamp="2026-01-01T00:00:00Z")
    status = msgspec.structs.replace(pod.status, conditions=(condition,))
    pod = msgspec.structs.replace(pod, metadata=meta, status=status)
    booking = booking_of(pod, Shapes().of(pod)).booking
    assert (booking.terminating, booking.preempted) == (deleting, preempted)


@pytest.mark.parametrize(
    ("conditions", "start", "initialized"),
    [
        ([], 100.0, 0.0),
        ([("PodScheduled", "True", "02:00")], 120.0, 0.0),
        ([("PodScheduled", "False", "02:00")], 100.0, 0.0),
        ([("Initialized", "True", "02:30"), ("PodScheduled", "True", "02:10")], 130.0, 150.0),
        ([("Initialized", "False", "02:30")], 100.0, 0.0),
    ],
)
def test_a_booking_starts_when_its_pod_was_scheduled(
    conditions: list[tuple[str, str, str]], start: float, initialized: float
) -> None:
    pod = make_pod("p", node="n")
    created = msgspec.structs.replace(pod.metadata, creation_timestamp="1970-01-01T00:01:40Z")
    found = tuple(
        Condition(type=kind, status=status, last_transition_time=f"1970-01-01T00:{at}Z")
        for kind, status, at in conditions
    )
    with_conditions = msgspec.structs.replace(pod.status, conditions=found)
    pod = msgspec.structs.replace(pod, metadata=created, status=with_conditions)
    booking = booking_of(pod, Shapes().of(pod)).booking
    assert (booking.start, booking.initialized) == (start, initialized)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ({"persistentVolumeClaim": {"claimName": "c"}}, True),
        ({"image": {"reference": "r"}}, True),
        ({"ephemeral": {"volumeClaimTemplate": {}}}, True),
        ({"gcePersistentDisk": {"pdName": "d"}}, True),
        ({"awsElasticBlockStore": {"volumeID": "d"}}, True),
        ({"iscsi": {"targetPortal": "t", "iqn": "i", "lun": 0}}, True),
        ({"rbd": {"monitors": ["m"], "image": "i"}}, True),
        ({"emptyDir": {}}, False),
        ({"configMap": {"name": "c"}}, False),
        ({"hostPath": {"path": "/"}}, False),
    ],
)
def test_only_volumes_that_a_plugin_looks_at_are_kept(
    source: dict[str, object], kept: bool
) -> None:
    pod = kept_pod(make_pod("p", volumes=[{"name": "v", **source}]))
    assert [volume.name for volume in pod.spec.volumes] == (["v"] if kept else [])


def test_what_scheduling_never_reads_of_a_pod_is_not_kept() -> None:
    container = {
        "name": "c",
        "resources": {"requests": {"cpu": "1"}},
        "volumeMounts": [{"name": "v", "mountPath": "/"}],
    }
    old = {"koordinator.sh/batch-cpu": "1"}
    pod = make_pod(
        "p", containers=[container], initContainers=[container], overhead=old,
        annotations={f"{_PREFIX}/reserve-pod": "true", "a": "b"}, schedulerName="s",
    )  # fmt: skip
    status = msgspec.structs.replace(
        pod.status, message="m", host_ip="1", pod_ip="2", pod_ips=(), phase="Running"
    )
    meta = msgspec.structs.replace(pod.metadata, finalizers=("f",))
    kept = kept_pod(msgspec.structs.replace(pod, metadata=meta, status=status))
    assert kept.metadata == msgspec.structs.replace(
        pod.metadata, finalizers=(), annotations={"a": "b"}
    )
    assert kept.status == msgspec.structs.replace(pod.status, phase="Running")
    for part in (kept.spec.containers, kept.spec.init_containers):
        assert [(each.name, each.volume_mounts) for each in part] == [("c", ())]
        assert part[0].resources.requests == {"cpu": Quantity.of(1)}
    assert list(kept.spec.overhead) == ["kubernetes.io/batch-cpu"]
    assert kept.spec.scheduler_name == "s"


@pytest.mark.parametrize(("size", "kept"), [(64 * 1024, True), (64 * 1024 + 1, False)])
def test_an_annotation_has_at_most_64_kib(size: int, kept: bool) -> None:
    pod = kept_pod(make_pod("p", annotations={"a": "x" * size}))
    assert ("a" in pod.metadata.annotations) == kept


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-7", -7),
        ("2147483647", 2**31 - 1),
        ("-2147483648", -(2**31)),
        ("2147483648", None),
        ("-2147483649", None),
        ("", None),
        ("+1", None),
        ("1.5", None),
        (" 1", None),
        ("\u0661", None),
        ("12345678901", None),
    ],
)
def test_a_priority_in_a_label_is_a_whole_number_of_32_bits(text: str, number: int | None) -> None:
    assert int32_of(text) == number


def test_conditions_and_addresses_of_a_node_are_not_kept() -> None:
    node = make_node("n")
    status = msgspec.structs.replace(
        node.status, conditions=(_condition(),), capacity=node.status.allocatable
    )
    kept = kept_node(msgspec.structs.replace(node, status=status))
    assert kept.status == msgspec.structs.replace(node.status, capacity={})


@pytest.mark.parametrize(
    ("text", "node", "uid"),
    [
        ('{"name":"r","uid":"u"}', "n", "u"),
        ('{"name":"r"}', "n", ""),
        ('{"uid":"u"}', "", ""),
        ("[", "n", ""),
        ("", "n", ""),
        (None, "n", ""),
    ],
)
def test_the_reservation_of_a_bound_pod_is_what_its_annotation_names(
    text: str | None, node: str, uid: str
) -> None:
    key = f"{_PREFIX}/reservation-allocated"
    pod = make_pod("p", node=node, annotations={} if text is None else {key: text})
    assert reservation_of(pod) == uid
    booking = booking_of(pod, Shapes().of(pod)).booking
    if node:
        assert booking.allocation.reservation == uid


def test_a_booking_has_what_its_annotations_record() -> None:
    pod = make_pod(
        "p",
        node="n",
        annotations={
            f"{_PREFIX}/resource-status": '{"cpuset":"0-1"}',
            f"{_PREFIX}/device-allocated": "{",
        },
    )
    meta = msgspec.structs.replace(pod.metadata, deletion_timestamp="1970-01-01T00:01:40Z")
    read = booking_of(msgspec.structs.replace(pod, metadata=meta), Shapes().of(pod))
    assert str(read.booking.allocation.cpus) == "0-1"
    assert (read.booking.key, read.booking.uid) == ("default/p", "uid-default-p")
    assert (read.booking.terminating, read.booking.ends) == (True, 100.0)
    assert [problem.obj for problem in read.problems] == ["Pod default/p"]
