"""Templates of shared GPUs from their ConfigMap, and what feature gates change of objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apis.core import ConfigMap, ObjectMeta
from apis.decode import decode_object
from apis.device import Device
from apis.keys import ANNOTATION_DEVICE_ALLOCATED, ANNOTATION_GPU_MINORS
from apis.scheduling_pod import PodSchedulingGate, SchedulingPod, decode_scheduling_pod
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.configuration.gates import GATES, WITH_EFFECT
from cluster.scheduler.configuration.loading import load
from cluster.scheduler.cycle.scheduling import Placed
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.manifests import config_map, gpu_templates
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.sources.objects import kept_pod, pod_keeper
from kube.cache import Change, Event
from kube.connection import Connection
from kube.kept_client import KeptClient
from tests.cluster.scheduler.devices.making import a_gpu
from tests.cluster.scheduler.making import make_node, make_pod


def _process(folder: Path, gates: str = "") -> SchedulerProcess:
    file = folder / "configuration"
    file.write_text(config_map()["data"]["koord-scheduler-config"])
    flags = [f"--config={file}", *([f"--feature-gates={gates}"] if gates else [])]
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    return SchedulerProcess(nowhere, load(parse(flags)), seed=1, clock=lambda: 1000.0)


def _event(text: str | None, change: Change = Change.MODIFIED) -> Event[ConfigMap]:
    data = {} if text is None else {"data.yaml": text}
    meta = ObjectMeta(name="gpu-shared-resource-templates", namespace="koordinator-system")
    return Event(change, None, ConfigMap(metadata=meta, data=data))


def test_the_shipped_templates_are_read(tmp_path: Path) -> None:
    process = _process(tmp_path)
    source = process.templates
    assert source is not None
    source.changed(_event(gpu_templates()["data"]["data.yaml"], Change.ADDED))
    templates = process.plugins.devices.templates
    assert len(templates) == 8
    assert templates["huawei-Ascend-310P3"]["vir02"] == {
        "huawei.com/npu-core": 2,
        "huawei.com/npu-cpu": 2,
        "huawei.com/npu-dvpp": 25,
        "koordinator.sh/gpu-memory": 6 << 30,
    }
    assert "huawei.com/npu-dvpp" not in templates["huawei-Ascend-910"]["vir16"]
    source.changed(_event(None, Change.DELETED))
    assert not process.plugins.devices.templates


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2]",
        "a: {b: {cpu: many}}",
        "[" * 5000,
        "a: &a {b: {cpu: 1}}\nb: *c",
        "a: {b: {cpu: .inf}}",
        "a: {1: {cpu: 1}, ? [x] : {}}",
        "- 1",
    ],
)
def test_a_text_that_cannot_be_used_leaves_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    process = _process(tmp_path)
    source = process.templates
    assert source is not None
    source.changed(_event("m: {t: {cpu: '2'}}"))
    source.changed(_event(text))
    assert process.plugins.devices.templates == {"m": {"t": {"cpu": 2000}}}
    assert "the former templates stay in force" in caplog.text
    source.changed(_event("m: {t: {cpu: 3}}"))
    assert process.plugins.devices.templates == {"m": {"t": {"cpu": 3000}}}


@pytest.mark.parametrize(
    "meta",
    [
        ObjectMeta(name="gpu-shared-resource-templates", namespace="default"),
        ObjectMeta(name="other", namespace="koordinator-system"),
    ],
)
def test_other_config_maps_change_no_template(tmp_path: Path, meta: ObjectMeta) -> None:
    process = _process(tmp_path)
    source = process.templates
    assert source is not None
    source.changed(_event("m: {t: {cpu: '2'}}"))
    for data in ({}, {"data.yaml": "m: {t: {cpu: 3}}"}):
        for change in Change:
            source.changed(Event(change, None, ConfigMap(metadata=meta, data=data)))
    assert process.plugins.devices.templates == {"m": {"t": {"cpu": 2000}}}


def test_templates_wake_pods_that_devices_held_back(tmp_path: Path) -> None:
    process = _process(tmp_path)
    source = process.templates
    assert source is not None
    process.tables.upsert_node(make_node("n0", allocatable={"koordinator.sh/gpu": "100"}))
    pod = make_pod("p", requests={"koordinator.sh/gpu": "100"}, schedulerName="koord-scheduler")
    process.source.pod_event(Event(Change.ADDED, None, pod))
    assert process.attempts.next(1000.0)
    # Its back-off, of 10 s at most, is over.
    assert not process.attempts.next(1020.0)
    source.changed(_event("m: {t: {cpu: 3}}"))
    assert process.attempts.next(1020.0)


@pytest.mark.parametrize(
    ("gates", "labels", "priority", "policy"),
    [
        ({}, {"koordinator.sh/priority": "7"}, 5, None),
        ({"PriorityTransformer": True}, {"koordinator.sh/priority": "7"}, 7, None),
        ({"PriorityTransformer": True}, {"koordinator.sh/priority": "-7"}, -7, None),
        ({"PriorityTransformer": True}, {}, 5, None),
        ({"PriorityTransformer": True}, {"koordinator.sh/priority": "7.5"}, 5, None),
        ({"PriorityTransformer": True}, {"koordinator.sh/priority": "9" * 10}, 5, None),
        ({"PriorityTransformer": True}, {"koordinator.sh/priority": "9" * 5000}, 5, None),
        ({"PreemptionPolicyTransformer": True}, {}, 5, "Never"),
        (
            {"PreemptionPolicyTransformer": True},
            {"scheduling.koordinator.sh/preemption-policy": "PreemptLowerPriority"},
            5,
            "PreemptLowerPriority",
        ),
        (
            {"PreemptionPolicyTransformer": True},
            {"scheduling.koordinator.sh/preemption-policy": "Perhaps"},
            5,
            "Never",
        ),
    ],
)
def test_gates_replace_priority_and_preemption_policy(
    gates: dict[str, bool], labels: dict[str, str], priority: int, policy: str | None
) -> None:
    pod = make_pod("p", labels=labels, priority=5)
    kept = pod_keeper(gates)(pod)
    assert kept.spec.priority == priority
    assert kept.spec.preemption_policy == (policy or kept_pod(pod).spec.preemption_policy)


@pytest.mark.parametrize("adaption", [True, False])
def test_device_plugins_get_their_annotations_with_the_gate_alone(
    tmp_path: Path, adaption: bool
) -> None:
    process = _process(tmp_path, f"DevicePluginAdaption={str(adaption).lower()}")
    process.tables.upsert_node(make_node("n0", allocatable={"koordinator.sh/gpu": "100"}))
    device = {"metadata": {"name": "n0"}, "spec": {"devices": [a_gpu(0)]}}
    raw = json.dumps(device).encode()
    process.plugins.devices.set_device(decode_object(raw, Device, obj="n0"))
    pod = make_pod("p", requests={"koordinator.sh/gpu": "100"}, schedulerName="koord-scheduler")
    placed = process.scheduling.schedule(
        key="default/p",
        uid="u",
        shape=process.source.shape_of(pod),
        profile="koord-scheduler",
        now=1.0,
    )
    assert isinstance(placed, Placed)
    assert placed.recorded.annotations.get(ANNOTATION_DEVICE_ALLOCATED)
    assert (placed.recorded.annotations.get(ANNOTATION_GPU_MINORS) == "0") == adaption


def test_gates_without_effect_are_named(tmp_path: Path) -> None:
    assert GATES.keys() >= WITH_EFFECT
    gates = (
        "SkipFilterWithNominatedPods=true,SupportParentQuotaSubmitPod=true,ResizePod=true,"
        "PriorityTransformer=true,SyncBarrier=false,Foreign=true"
    )
    notices = _process(tmp_path, gates).configuration.notices
    named = {notice for notice in notices if notice.startswith("feature gates that have no effect")}
    assert named == {
        "feature gates that have no effect here: SupportParentQuotaSubmitPod=true,"
        " SkipFilterWithNominatedPods=true"
    } | {notice for notice in named if "Foreign" in notice}
    assert any("Foreign" in notice for notice in notices)


_REPLACE = "pod.koordinator.sh/replace-resources"
_RUNS = {"name": "c", "allocatedResources": {"cpu": "2"}, "resources": {"requests": {"cpu": "2"}}}


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("", {"cpu": 2500, "memory": 1 << 30}),
        ("cpu:kubernetes.io/batch-cpu", {"kubernetes.io/batch-cpu": 2500, "memory": 1 << 30}),
        ("cpu:kubernetes.io/batch-cpu,memory:", {"kubernetes.io/batch-cpu": 2500}),
        # The pod names the target itself: source and target stay.
        ("cpu:memory", {"cpu": 2500, "memory": 1 << 30}),
        ("memory:,cpu:memory", {"memory": 2500}),
        ("cpu,memory:a:b,absent:cpu", {"cpu": 2500, "memory": 1 << 30}),
        ("cpu:x,x:y", {"x": 2500, "memory": 1 << 30}),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_resources_are_replaced_with_the_gate_alone(
    tmp_path: Path, text: str, amounts: dict[str, int], running: bool
) -> None:
    requests = {"cpu": "2", "memory": "1Gi"}
    pod = make_pod(
        "p",
        requests=requests,
        annotations={_REPLACE: text},
        overhead={"cpu": "500m", "memory": "0"},
    )
    if running:
        raw = json.dumps({"status": {"containerStatuses": [_RUNS]}}).encode()
        status = decode_scheduling_pod(raw).status
        pod = msgspec.structs.replace(pod, status=status)
    assert pod_keeper({})(pod) == kept_pod(pod)
    on = _process(tmp_path, "ReplaceResourcesTransformer=true")
    kept = pod_keeper(on.configuration.gates)(pod)
    # Another resource than cpu counts by units, cpu by thousandths.
    assert dict(on.source.shape_of(kept).requests) == amounts


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(("priority", "waits"), [(10, False), (9, True)])
def test_a_nomination_by_another_scheduler_counts_with_the_gate_alone(
    tmp_path: Path, on: bool, priority: int, waits: bool
) -> None:
    process = _process(tmp_path, f"CrossSchedulerNomination={str(on).lower()}")
    process.tables.upsert_node(make_node("n0", allocatable={"cpu": "4"}))

    def see(pod: SchedulingPod) -> None:
        process.source.pod_event(Event(Change.ADDED, None, pod))

    def placed(uid: str) -> bool:
        while process.attempts.next(1000.0):
            pass
        return uid in process.tables.bookings

    theirs = make_pod("theirs", requests={"cpu": "3"}, schedulerName="another", priority=10)
    nominated = msgspec.structs.replace(theirs.status, nominated_node_name="n0")
    process.bind = lambda placement: None  # type: ignore[method-assign]
    see(msgspec.structs.replace(theirs, status=nominated))
    ours = make_pod("ours", requests={"cpu": "2"}, schedulerName="koord-scheduler")
    see(msgspec.structs.replace(ours, spec=msgspec.structs.replace(ours.spec, priority=priority)))
    assert placed(ours.metadata.uid) == (not on or not waits)
    # The other scheduler takes the nomination back.
    see(theirs)
    process.queue.activate([ours.metadata.uid], 1000.0)
    assert placed(ours.metadata.uid)


@pytest.mark.parametrize(
    "end",
    ["unnominated", "deleted", "being deleted", "bound elsewhere", "ours now", "ours and gated"],
)
def test_the_end_of_a_nomination_by_another_scheduler_wakes_pods(tmp_path: Path, end: str) -> None:
    process = _process(tmp_path, "CrossSchedulerNomination=true")
    process.bind = lambda placement: None  # type: ignore[method-assign]
    process.tables.upsert_node(make_node("n0", allocatable={"cpu": "4"}))
    process.tables.upsert_node(make_node("n1", allocatable={"cpu": "1"}))
    theirs = make_pod("theirs", requests={"cpu": "3"}, schedulerName="another", priority=10)
    nominated = msgspec.structs.replace(
        theirs, status=msgspec.structs.replace(theirs.status, nominated_node_name="n0")
    )
    process.source.pod_event(Event(Change.ADDED, None, nominated))
    ours = make_pod("ours", requests={"cpu": "2"}, schedulerName="koord-scheduler", priority=9)
    process.source.pod_event(Event(Change.ADDED, None, ours))
    while process.attempts.next(1000.0):
        pass
    assert process.queue.state_of(ours.metadata.uid) is QueueState.UNSCHEDULABLE
    meta, spec = theirs.metadata, theirs.spec
    event = {
        "unnominated": Event(Change.MODIFIED, nominated, theirs),
        "deleted": Event(Change.DELETED, nominated, nominated),
        "being deleted": Event(
            Change.MODIFIED,
            nominated,
            msgspec.structs.replace(
                nominated,
                metadata=msgspec.structs.replace(meta, deletion_timestamp="2026-01-01T00:00:00Z"),
            ),
        ),
        "bound elsewhere": Event(
            Change.MODIFIED,
            nominated,
            msgspec.structs.replace(nominated, spec=msgspec.structs.replace(spec, node_name="n1")),
        ),
        "ours now": Event(
            Change.MODIFIED,
            nominated,
            msgspec.structs.replace(
                theirs, spec=msgspec.structs.replace(spec, scheduler_name="koord-scheduler")
            ),
        ),
        "ours and gated": Event(
            Change.MODIFIED,
            nominated,
            msgspec.structs.replace(
                theirs,
                spec=msgspec.structs.replace(
                    spec,
                    scheduler_name="koord-scheduler",
                    scheduling_gates=(PodSchedulingGate("g"),),
                ),
            ),
        ),
    }[end]
    process.source.pod_event(event)
    assert process.scheduling.nominator.node_of(theirs.metadata.uid) == ""
    if end == "ours now":
        # It is tried itself, and takes the room.
        assert process.queue.state_of(theirs.metadata.uid) is QueueState.ACTIVE
    else:
        assert process.queue.state_of(ours.metadata.uid) is not QueueState.UNSCHEDULABLE


@pytest.mark.parametrize("on", [True, False])
def test_a_reservation_keeps_what_its_devices_have_with_the_gate_alone(
    tmp_path: Path, on: bool
) -> None:
    process = _process(tmp_path, f"ResizePod={str(on).lower()}")
    amounts = {"nvidia.com/gpu": "2", "cpu": "8", "koordinator.sh/gpu-core": "200"}
    process.tables.upsert_node(make_node("n0", allocatable=amounts))
    device = {"metadata": {"name": "n0"}, "spec": {"devices": [a_gpu(0), a_gpu(1)]}}
    raw = json.dumps(device).encode()
    process.plugins.devices.set_device(decode_object(raw, Device, obj="n0"))
    written: list[ReservationPlacement] = []
    process.reserve = (  # type: ignore[method-assign]
        lambda placement: written.append(placement)
    )
    requests = {"cpu": "2", "nvidia.com/gpu": "2"}
    reservation = {
        "metadata": {"name": "r", "uid": "u"},
        "spec": {
            "template": {
                "spec": {
                    "schedulerName": "koord-scheduler",
                    "containers": [{"name": "c", "resources": {"requests": requests}}],
                }
            },
            "owners": [{"labelSelector": {"matchLabels": {"app": "a"}}}],
            "ttl": "1h",
        },
    }

    def see(obj: dict[str, Any]) -> None:
        obj["metadata"]["resourceVersion"] = "1"
        process.reservations.take(json.dumps({"type": "MODIFIED", "object": obj}).encode())

    see(reservation)
    assert process.attempts.next(1000.0)
    (placement,) = written
    kept = dict(placement.allocatable)
    assert {name: kept.pop(name) for name in requests} == requests
    gpus = {"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu-memory-ratio": "200"}
    memory = kept.pop("koordinator.sh/gpu-memory", None)
    assert kept == (gpus if on else {})
    assert (memory is not None) == on
    status = {"phase": "Available", "nodeName": "n0", "allocatable": placement.allocatable}
    annotations = {key: text for key, text in placement.annotations.items() if text}
    see(
        {
            **reservation,
            "metadata": {"name": "r", "uid": "u", "annotations": annotations},
            "status": status,
        }
    )
    booking = process.tables.bookings["u"]
    assert booking.shape.requests.get("koordinator.sh/gpu-core", 0) == (200 if on else 0)
    assert len(booking.allocation.devices["gpu"]) == 2
    assert not process.reservation_source.problems
