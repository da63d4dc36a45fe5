"""Templates of shared GPUs from their ConfigMap, and what feature gates change of objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apis.core import ConfigMap, ObjectMeta
from apis.decode import decode_object
from apis.device import Device
from apis.keys import ANNOTATION_DEVICE_ALLOCATED, ANNOTATION_GPU_MINORS
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.configuration.gates import GATES, WITH_EFFECT
from cluster.scheduler.configuration.loading import load
from cluster.scheduler.cycle.scheduling import Placed
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
    gates = "ResizePod=true,PriorityTransformer=true,SyncBarrier=false,Foreign=true"
    notices = _process(tmp_path, gates).configuration.notices
    assert "feature gates that have no effect here: ResizePod=true" in notices
    assert any("Foreign" in notice for notice in notices)
