"""The series of usage, host applications and batch resources."""

from __future__ import annotations

from apis.qos import QoSClass
from hooks.subject import HostAppSubject
from koordlet.exposition.node_metrics import of_allocatable, of_usage
from koordlet.measurement.series import Metric

_SAMPLES = {
    Metric.NODE_CPU: {("", ""): 9.5},
    Metric.NODE_MEMORY: {("", ""): 2.0e9},
    Metric.HOST_APP_CPU: {("nginx", ""): 1.5, ("gone", ""): 4.0},
    Metric.HOST_APP_MEMORY: {("nginx", ""): 3.0e8},
}


def test_usage_of_the_node_and_of_declared_host_applications() -> None:
    app = HostAppSubject(
        name="nginx", qos=QoSClass.LS, cgroup="host-latency-sensitive/nginx", priority="koord-prod"
    )
    labels = {"host_application_name": "nginx", "priority_class": "koord-prod", "qos": "LS"}
    found = [
        (name, dict(own), value)
        for name, own, value in of_usage(lambda metric: _SAMPLES.get(metric, {}), [app])
    ]
    assert found == [
        ("node_used_cpu_cores", {}, 9.5),
        ("node_used_memory_bytes", {}, 2.0e9),
        ("host_application_resource_usage", labels | {"resource": "cpu"}, 1.5),
        ("host_application_resource_usage", labels | {"resource": "memory"}, 3.0e8),
    ]


def test_nothing_measured_is_no_series() -> None:
    assert list(of_usage(lambda metric: {}, [])) == []


def test_batch_and_mid_resources_have_upstreams_units_and_zero_where_the_node_lacks_one() -> None:
    [family] = of_allocatable(
        "n1", {"kubernetes.io/batch-cpu": 24400, "kubernetes.io/batch-memory": 7, "cpu": 16000}
    )
    assert [
        (each.labels["resource"], each.labels["unit"], each.value) for each in family.samples
    ] == [
        ("kubernetes.io/batch-cpu", "integer", 24400),
        ("kubernetes.io/batch-memory", "byte", 7),
        ("kubernetes.io/mid-cpu", "integer", 0),
        ("kubernetes.io/mid-memory", "byte", 0),
    ]
