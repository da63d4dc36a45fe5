"""/metrics/resources: what pods request, as kube-scheduler shows it."""

from __future__ import annotations

from cluster.scheduler.serving.resource_metrics import pod_lines
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod


def test_amounts_have_the_units_of_their_resources() -> None:
    requests = {
        "cpu": "1500m", "memory": "1Gi", "ephemeral-storage": "2Gi", "hugepages-2Mi": "4Mi",
        "nvidia.com/gpu": "2", "example.com/none": "0",
    }  # fmt: skip
    pod = make_pod(
        "a", requests=requests, limits={"cpu": "2"}, node="n1", priority=7, schedulerName="s"
    )
    lines = [line for line in pod_lines((pod,), Shapes().of) if not line.startswith("#")]
    before = 'namespace="default",pod="a",node="n1",scheduler="s",priority="7"'
    assert sorted(lines) == sorted(
        f'{name}{{{before},resource="{resource}",unit="{unit}"}} {value}\n'
        for name, resource, unit, value in (
            ("kube_pod_resource_request", "cpu", "cores", "1.5"),
            ("kube_pod_resource_request", "memory", "bytes", str(1 << 30)),
            ("kube_pod_resource_request", "ephemeral-storage", "bytes", str(2 << 30)),
            ("kube_pod_resource_request", "hugepages-2Mi", "bytes", str(4 << 20)),
            ("kube_pod_resource_request", "nvidia.com/gpu", "integer", "2"),
            ("kube_pod_resource_limit", "cpu", "cores", "2"),
        )
    )


def test_a_pod_that_has_ended_is_left_out() -> None:
    pod = make_pod("a", requests={"cpu": "1"})
    ended = type(pod)(metadata=pod.metadata, spec=pod.spec, status=type(pod.status)(phase="Failed"))
    running = make_pod("b", requests={"example.com/none": "0", "cpu": "1"})
    lines = [line for line in pod_lines((ended, running), Shapes().of) if line[0] != "#"]
    # An amount of 0 is left out as well, and hides no other.
    (line,) = lines
    assert 'pod="b"' in line and 'resource="cpu"' in line
