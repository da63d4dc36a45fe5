"""An edit of a bound pod after which it hinders others less has these tried at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.scheduler.beds.core import Bed

_PREFIX = "scheduling.koordinator.sh"
_STATUS = f"{_PREFIX}/resource-status"
_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    multiPoint:
      enabled: [{name: NodeNUMAResource}, {name: DeviceShare}, {name: LoadAwareScheduling}]
  pluginConfig:
  - name: LoadAwareScheduling
    args: {allowCustomizeEstimation: true}
"""
_PROD_THRESHOLDS = _CONFIGURATION.replace(
    "allowCustomizeEstimation: true", "usageThresholds: {}, prodUsageThresholds: {cpu: 50}"
)
_QOS_CLASS = "koordinator.sh/qosClass"


def _show(bed: Bed, kind: str, obj: dict[str, Any]) -> None:
    cache = next(each for each in bed.core.caches if each.resource.kind == kind)
    bed.show(cache, "ADDED", obj)


def _edit(bed: Bed, name: str, kind: str, values: dict[str, str | None]) -> None:
    """Set labels or annotations of a pod; None removes one."""
    held = bed.pods[name]["metadata"][kind]
    for key, value in values.items():
        if value is None:
            del held[key]
        else:
            held[key] = value
    bed.change(name)


@pytest.mark.parametrize("record", [None, '{"cpuset":"0-3"}'])
def test_cpus_are_free_that_are_not_recorded_any_more(record: str | None) -> None:
    bed = Bed(_CONFIGURATION)
    # More cpu than CPUs that are known, so that these alone are short.
    bed.node("n", 16)
    detail = [{"id": cpu, "core": cpu // 2, "socket": 0, "node": 0} for cpu in range(8)]
    cpus = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    _show(bed, "NodeResourceTopology", {"metadata": {"name": "n", "annotations": cpus}})
    bed.pod("running", 8, 9_500, node="n")
    _edit(bed, "running", "annotations", {_STATUS: '{"cpuset":"0-7"}'})
    bed.pod("waiting", 4, 9_500)
    _edit(bed, "waiting", "labels", {_QOS_CLASS: "LSR"})
    bed.run()
    assert "not enough cpus available" in bed.messages["waiting"]
    _edit(bed, "running", "annotations", {_STATUS: record})
    bed.run(15)
    assert bed.node_of("waiting") == "n"
    status = json.loads(bed.pods["waiting"]["metadata"]["annotations"][_STATUS])
    assert status["cpuset"] == ("0-3" if record is None else "4-7")


def test_cores_may_be_shared_once_a_pod_on_them_is_not_lse_any_more() -> None:
    bed = Bed(_CONFIGURATION)
    bed.node("n", 16)
    detail = [{"id": cpu, "core": cpu // 2, "socket": 0, "node": 0} for cpu in range(8)]
    cpus = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    _show(bed, "NodeResourceTopology", {"metadata": {"name": "n", "annotations": cpus}})
    bed.pod("running", 4, 9_500, node="n")
    # A CPU of each core.
    _edit(bed, "running", "annotations", {_STATUS: '{"cpuset":"0,2,4,6"}'})
    _edit(bed, "running", "labels", {_QOS_CLASS: "LSE"})
    bed.pod("waiting", 2, 9_500)
    spread = '{"preferredCPUBindPolicy": "SpreadByPCPUs"}'
    _edit(bed, "waiting", "annotations", {f"{_PREFIX}/resource-spec": spread})
    _edit(bed, "waiting", "labels", {_QOS_CLASS: "LSE"})
    bed.run()
    assert "not enough cpus available" in bed.messages["waiting"]
    _edit(bed, "running", "labels", {_QOS_CLASS: "LSR"})
    bed.run(15)
    assert bed.node_of("waiting") == "n"


def _half_a_gpu(bed: Bed, name: str, **made: Any) -> None:
    requests = {"cpu": "1", "koordinator.sh/gpu": "50"}
    container = {"name": "c", "resources": {"requests": requests}}
    bed.pod(name, 1, 9_500, containers=[container], **made)


def test_a_part_of_a_device_is_free_that_is_not_recorded_any_more() -> None:
    bed = Bed(_CONFIGURATION)
    amounts = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    half = dict.fromkeys(amounts, "50")
    _show(
        bed,
        "Node",
        {
            "metadata": {"name": "n"},
            "status": {"allocatable": {"cpu": "8", "pods": "9", "koordinator.sh/gpu": "100"}},
        },
    )
    gpu = {"type": "gpu", "minor": 0, "health": True, "resources": amounts}
    _show(bed, "Device", {"metadata": {"name": "n"}, "spec": {"devices": [gpu]}})
    record = f"{_PREFIX}/device-allocated"
    _half_a_gpu(bed, "running", node="n")
    whole = json.dumps({"gpu": [{"minor": 0, "resources": amounts}]})
    _edit(bed, "running", "annotations", {record: whole})
    _half_a_gpu(bed, "waiting")
    bed.run()
    assert "Insufficient gpu devices" in bed.messages["waiting"]
    part = json.dumps({"gpu": [{"minor": 0, "resources": half}]})
    _edit(bed, "running", "annotations", {record: part})
    bed.run(15)
    assert bed.node_of("waiting") == "n"


def test_a_pod_that_is_expected_to_use_less_gives_way_at_once() -> None:
    bed = Bed(_CONFIGURATION)
    bed.node("n", 4)
    used = {"nodeUsage": {"resources": {"cpu": "0", "memory": "0"}}}
    status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": used}
    _show(bed, "NodeMetric", {"metadata": {"name": "n"}, "status": status})
    factors = f"{_PREFIX}/load-estimated-scaling-factors"
    bed.pod("running", 2, 9_500, node="n")
    _edit(bed, "running", "annotations", {factors: '{"cpu":120}'})
    # 2,400 m and 850 m of 4,000 m are above the threshold of 65 %.
    bed.pod("waiting", 1, 9_500)
    bed.run()
    assert "cpu usage exceed threshold" in bed.messages["waiting"]
    _edit(bed, "running", "annotations", {factors: '{"cpu":50}'})
    bed.run(15)
    assert bed.node_of("waiting") == "n"


@pytest.mark.parametrize(
    ("priority", "label", "value"),
    [
        (9_500, "koordinator.sh/priority-class", "koord-batch"),
        # Outside of all bands, where the QoS class stands for the class of the priority.
        (0, _QOS_CLASS, "BE"),
    ],
)
def test_a_pod_that_is_not_prod_any_more_does_not_count_for_prod_thresholds(
    priority: int, label: str, value: str
) -> None:
    bed = Bed(_PROD_THRESHOLDS)
    bed.node("n", 4)
    used = {"nodeUsage": {"resources": {"cpu": "0", "memory": "0"}}}
    status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": used}
    _show(bed, "NodeMetric", {"metadata": {"name": "n"}, "status": status})
    bed.pod("running", 2, priority, node="n")
    # 1,700 m and 850 m of 4,000 m.
    bed.pod("waiting", 1, 9_500)
    bed.run()
    assert "cpu usage exceed threshold" in bed.messages["waiting"]
    _edit(bed, "running", "labels", {label: value})
    bed.run(15)
    assert bed.node_of("waiting") == "n"
