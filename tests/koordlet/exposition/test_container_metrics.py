"""Metrics of single containers stand while they are true, under upstream's names."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from apis.qos import KubeQoS
from hooks.subject import Amounts, ContainerSpec, ContainerSubject, make_pod
from koordlet.exposition import container_metrics
from linux.resources import Resource
from tests.koordlet.executor.bed import Bed
from tests.simulated import RHEL_9
from tests.simulated.kubelet import Limits as PodLimits

POD = make_pod(
    namespace="shop",
    name="web",
    uid="u1",
    labels={},
    annotations={},
    kube_qos=KubeQoS.BESTEFFORT,
    specs=(
        ContainerSpec(
            "main",
            amounts=Amounts(
                batch_cpu_request_milli=1500,
                batch_memory_limit_bytes=1 << 30,
                mid_memory_request_bytes=1 << 20,
                mid_cpu_limit_milli=700,
            ),
        ),
    ),
)
MAIN = ContainerSubject(pod=POD, name="main", id="c1")
WHOSE = {"pod_uid": "u1", "pod_name": "web", "pod_namespace": "shop"}
OF_MAIN = {"node": "n1", "container_name": "main", **WHOSE}


def samples(metrics: Iterable[Metric]) -> list[tuple[str, dict[str, str], float]]:
    return [(one.name, one.labels, one.value) for family in metrics for one in family.samples]


def of_processes(bed: Bed) -> list[tuple[str, dict[str, str], float]]:
    views = bed.executor.standing(container_metrics.OF_PROCESSES)
    return samples(container_metrics.of_processes("n1", [(MAIN, view) for _, view in views]))


def test_an_oom_score_is_reported_while_the_processes_hold_it() -> None:
    bed = Bed()
    container = bed.kubelet.add_pod(PodLimits()).start(PodLimits())
    bed.want("container/c1", (container.cgroup, Resource.OOM_SCORE_ADJ, -500))
    assert of_processes(bed) == []
    bed.run()
    assert of_processes(bed) == [("koordlet_container_oom_score_adj", OF_MAIN, -500)]
    bed.want("container/c1")
    bed.run()
    assert of_processes(bed) == []


def test_a_cookie_is_reported_while_all_processes_hold_it() -> None:
    bed = Bed(RHEL_9)
    container = bed.kubelet.add_pod(PodLimits()).start(PodLimits())
    bed.kernel.fork(container.task)
    bed.want("container/c1", (container.cgroup, Resource.CORE_SCHED_COOKIE, "g"))
    bed.run()
    bed.run()
    cookie = str(container.task.cookie)
    labels = {
        **OF_MAIN,
        "container_id": "c1",
        "core_sched_group": "g",
        "core_sched_cookie": cookie,
    }
    assert of_processes(bed) == [("koordlet_container_core_sched_cookie", labels, 1)]
    container.task.cookie = 0
    bed.executor.plan()
    assert of_processes(bed) == []


def test_changes_of_cookies_are_counted_for_the_groups_changed_last() -> None:
    bed = Bed(RHEL_9)
    container = bed.kubelet.add_pod(PodLimits()).start(PodLimits())
    for number in range(300):
        bed.want("container/c1", (container.cgroup, Resource.CORE_SCHED_COOKIE, f"g{number}"))
        bed.executor.fill_budget()
        bed.run()
        bed.want("container/c1")
        bed.run()
    counted = samples(container_metrics.of_cookies("n1", bed.executor.cookie_changes))
    name = "koordlet_core_sched_cookie_manage_status"
    labels = {"node": "n1", "core_sched_group": "g299", "status": "succeeded"}
    assert counted[-1] == (name, labels, 2)  # given and taken
    assert len(counted) < 300


def test_batch_and_mid_amounts_have_their_units() -> None:
    whole = {"container_id": "c1", **OF_MAIN}
    assert samples(container_metrics.of_amounts("n1", [MAIN])) == [
        (
            "koordlet_container_resource_requests",
            {**whole, "resource": "kubernetes.io/batch-cpu", "unit": "integer"},
            1500,
        ),
        (
            "koordlet_container_resource_requests",
            {**whole, "resource": "kubernetes.io/mid-memory", "unit": "byte"},
            1 << 20,
        ),
        (
            "koordlet_container_resource_limits",
            {**whole, "resource": "kubernetes.io/batch-memory", "unit": "byte"},
            1 << 30,
        ),
        (
            "koordlet_container_resource_limits",
            {**whole, "resource": "kubernetes.io/mid-cpu", "unit": "integer"},
            700,
        ),
    ]
