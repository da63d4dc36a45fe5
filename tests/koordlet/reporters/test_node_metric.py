"""The NodeMetric status, field by field, and the policy that its spec sets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.decode import encode
from apis.keys import LABEL_PRIORITY_CLASS, LABEL_QOS_CLASS
from apis.nodemetric import (
    AggregatePolicy,
    NodeMetricCollectPolicy,
    NodeMetricSpec,
    NodeMetricStatus,
)
from apis.qos import KubeQoS, QoSClass
from hooks.subject import HostAppSubject, Pod, make_pod
from koordlet.measurement.series import Metric, Series
from koordlet.reporters.node_metric import (
    Gpu,
    Policy,
    amounts,
    measured,
    node_metric_status,
    policy_of,
)
from tests.koordlet.measured import Measured

GIB = 2**30
WALL = 1_700_000_000.9
SHORT = Policy(windows=("5m0s", "30m0s"))


def node(cpu: float = 12.3456, memory: float = 40 * GIB + 0.7, over_s: float = 300) -> Measured:
    made = Measured(now=10_000.0)
    made.constant(Series(Metric.NODE_CPU), cpu, over_s=over_s)
    made.constant(Series(Metric.NODE_MEMORY), memory, over_s=over_s)
    made.constant(Series(Metric.SYSTEM_CPU), 0.5, over_s=over_s)
    made.constant(Series(Metric.SYSTEM_MEMORY), 6 * GIB, over_s=over_s)
    return made


def pod(
    name: str,
    *,
    namespace: str = "default",
    kube_qos: KubeQoS = KubeQoS.BURSTABLE,
    priority: int | None = None,
    **labels: str,
) -> Pod:
    return make_pod(
        namespace=namespace,
        name=name,
        uid=f"uid-{name}",
        labels=labels,
        annotations={},
        kube_qos=kube_qos,
        priority=priority,
    )


def use(made: Measured, uid: str, cpu: float, memory: float) -> None:
    made.constant(Series(Metric.POD_CPU, uid), cpu)
    made.constant(Series(Metric.POD_MEMORY, uid), memory)


def report(
    made: Measured, *pods: Pod, policy: Policy = SHORT, apps: tuple[HostAppSubject, ...] = ()
) -> dict[str, Any]:
    return as_json(node_metric_status(made, pods, apps, policy, wall_s=WALL))


def as_json(status: NodeMetricStatus) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(encode(status))
    return decoded


def test_the_whole_report_of_a_small_node() -> None:
    made = node()
    use(made, "uid-web", 2.0, 4 * GIB)
    made.constant(Series(Metric.HOST_APP_CPU, "nginx"), 0.25)
    made.constant(Series(Metric.HOST_APP_MEMORY, "nginx"), 2**20)
    made.constant(Series(Metric.NODE_NUMA_CPU, "0"), 7.0)
    made.constant(Series(Metric.NODE_NUMA_MEMORY, "0"), GIB)
    made.constant(Series(Metric.SYSTEM_NUMA_CPU, "0"), 0.1)
    made.constant(Series(Metric.SYSTEM_NUMA_MEMORY, "0"), 1000)
    app = HostAppSubject("nginx", QoSClass.LS, "host-latency-sensitive/nginx", "koord-prod")
    status = node_metric_status(
        made,
        (pod("web"),),
        (app,),
        SHORT,
        wall_s=WALL,
        reclaimable=amounts(5799, 12357013095),
        peak=amounts(6201, 13412790681),
    )
    whole = {"resources": {"cpu": "12345m", "memory": "40Gi"}}
    system = {"resources": {"cpu": "500m", "memory": "6Gi"}}
    names = ("avg", "p50", "p90", "p95", "p99")
    assert as_json(status) == {
        "updateTime": "2023-11-14T22:13:20Z",
        "nodeMetric": {
            "nodeUsage": whole,
            "aggregatedNodeUsages": [
                {"usage": dict.fromkeys(names, whole), "duration": "5m0s"},
                {"usage": {name: {} for name in names}, "duration": "30m0s"},
            ],
            "systemUsage": system,
            "aggregatedSystemUsages": [
                {"usage": dict.fromkeys(names, system), "duration": "5m0s"},
                {"usage": {name: {} for name in names}, "duration": "30m0s"},
            ],
            "numaUsages": [
                {
                    "numaNodeID": 0,
                    "nodeUsage": {"resources": {"cpu": "7", "memory": "1Gi"}},
                    "systemUsage": {"resources": {"cpu": "100m", "memory": "1k"}},
                }
            ],
        },
        "podsMetric": [
            {
                "name": "web",
                "namespace": "default",
                "podUsage": {"resources": {"cpu": "2", "memory": "4Gi"}},
                "priority": "koord-prod",
                "qos": "LS",
                "extensions": {},
            }
        ],
        "hostApplicationMetric": [
            {
                "name": "nginx",
                "usage": {"resources": {"cpu": "250m", "memory": "1Mi"}},
                "priority": "koord-prod",
                "qos": "LS",
            }
        ],
        "prodReclaimableMetric": {
            "resource": {"resources": {"cpu": "5799m", "memory": "12357013095"}}
        },
        "prodPeakMetric": {"resource": {"resources": {"cpu": "6201m", "memory": "13412790681"}}},
    }


def test_percentiles_follow_upstreams_rank() -> None:
    made = Measured(now=10_000.0)
    made.values(Series(Metric.NODE_CPU), [float(value) for value in range(1, 8)])
    made.constant(Series(Metric.NODE_MEMORY), GIB, over_s=6)
    usages = report(made, policy=Policy(windows=("10s",)))["nodeMetric"]["aggregatedNodeUsages"]
    shown = {name: each["resources"]["cpu"] for name, each in usages[0]["usage"].items()}
    assert shown == {"avg": "4", "p50": "3", "p90": "6", "p95": "6", "p99": "6"}


@pytest.mark.parametrize(("over_s", "there"), [(149, False), (150, True)])
def test_a_window_is_reported_when_samples_span_half_of_it(over_s: float, there: bool) -> None:
    usages = report(node(over_s=over_s))["nodeMetric"]["aggregatedNodeUsages"]
    assert bool(usages[0]["usage"]["p95"]) is there


def test_pods_are_sorted_and_those_without_samples_of_both_are_left_out() -> None:
    made = node()
    for uid in ("uid-b", "uid-a", "uid-z"):
        use(made, uid, 1.0, GIB)
    made.constant(Series(Metric.POD_CPU, "uid-half"), 1.0)
    pods = (pod("b"), pod("a"), pod("half"), pod("none"), pod("z", namespace="a"))
    found = report(made, *pods)["podsMetric"]
    assert [(each["namespace"], each["name"]) for each in found] == [
        ("a", "z"),
        ("default", "a"),
        ("default", "b"),
    ]
    assert measured(made, within_s=300) == {"uid-a", "uid-b", "uid-z"}


@pytest.mark.parametrize(
    ("kube_qos", "labels", "priority", "shown"),
    [
        (KubeQoS.GUARANTEED, {}, None, ("LSR", "koord-prod")),
        (KubeQoS.BURSTABLE, {}, None, ("LS", "koord-prod")),
        (KubeQoS.BESTEFFORT, {}, None, ("BE", "koord-batch")),
        (KubeQoS.BURSTABLE, {LABEL_QOS_CLASS: "BE"}, None, ("BE", "koord-batch")),
        (KubeQoS.BESTEFFORT, {}, 9500, ("BE", "koord-prod")),
        (KubeQoS.BURSTABLE, {LABEL_QOS_CLASS: "LSE"}, 7500, ("LSE", "koord-mid")),
        (
            KubeQoS.BURSTABLE,
            {LABEL_QOS_CLASS: "SYSTEM", LABEL_PRIORITY_CLASS: "koord-free"},
            9500,
            ("SYSTEM", "koord-free"),
        ),
    ],
)
def test_classes_of_a_pod(
    kube_qos: KubeQoS, labels: dict[str, str], priority: int | None, shown: tuple[str, str]
) -> None:
    made = node()
    use(made, "uid-a", 1.0, GIB)
    found = report(made, pod("a", kube_qos=kube_qos, priority=priority, **labels))["podsMetric"][0]
    assert (found["qos"], found["priority"]) == shown


def with_caches() -> Measured:
    made = node()
    use(made, "uid-a", 1.0, 1000)
    made.constant(Series(Metric.NODE_MEMORY_WITH_PAGE_CACHE), 50 * GIB)
    made.constant(Series(Metric.SYSTEM_MEMORY_WITH_PAGE_CACHE), 9 * GIB)
    made.constant(Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "uid-a"), 2000)
    made.constant(Series(Metric.HOST_APP_CPU, "app"), 1)
    made.constant(Series(Metric.HOST_APP_MEMORY, "app"), 10)
    made.constant(Series(Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE, "app"), 20)
    return made


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ("usageWithoutPageCache", ("40Gi", "6Gi", "1k", "10")),
        ("usageWithPageCache", ("50Gi", "9Gi", "2000", "20")),
        # Cold pages are not collected here, so the series without page cache stand in.
        ("usageWithHotPageCache", ("40Gi", "6Gi", "1k", "10")),
    ],
)
def test_the_memory_policy_chooses_the_series(memory: str, shown: tuple[str, ...]) -> None:
    app = HostAppSubject("app", QoSClass.LS, "app")
    found = report(with_caches(), pod("a"), policy=Policy(memory=memory), apps=(app,))
    assert shown == (
        found["nodeMetric"]["nodeUsage"]["resources"]["memory"],
        found["nodeMetric"]["systemUsage"]["resources"]["memory"],
        found["podsMetric"][0]["podUsage"]["resources"]["memory"],
        found["hostApplicationMetric"][0]["usage"]["resources"]["memory"],
    )


def test_hot_pages_are_reported_where_they_are_measured() -> None:
    made = with_caches()
    made.constant(Series(Metric.NODE_MEMORY_WITH_HOT_PAGES), 45 * GIB)
    made.constant(Series(Metric.POD_MEMORY_WITH_HOT_PAGES, "uid-a"), 1500)
    found = report(made, pod("a"), policy=Policy(memory="usageWithHotPageCache"))
    assert found["nodeMetric"]["nodeUsage"]["resources"]["memory"] == "45Gi"
    assert found["podsMetric"][0]["podUsage"]["resources"]["memory"] == "1500"


def test_a_node_that_cannot_be_read_is_still_reported_with_its_pods() -> None:
    made = Measured(now=10_000.0)
    use(made, "uid-a", 1.0, GIB)
    found = report(made, pod("a"))
    assert found["nodeMetric"]["nodeUsage"] == {}
    assert len(found["podsMetric"]) == 1
    assert "prodPeakMetric" not in found
    assert found["prodReclaimableMetric"] == {"resource": {}}


def test_numa_nodes_are_sorted_by_number_and_those_without_usage_left_out() -> None:
    made = node()
    for number in ("10", "2"):
        made.constant(Series(Metric.NODE_NUMA_CPU, number), 1.0)
        made.constant(Series(Metric.NODE_NUMA_MEMORY, number), GIB)
    made.constant(Series(Metric.NODE_NUMA_CPU, "3"), 1.0)
    found = report(made)["nodeMetric"]["numaUsages"]
    assert [each["numaNodeID"] for each in found] == [2, 10]
    assert found[0]["systemUsage"] == {}


def test_gpus_of_node_and_pods() -> None:
    made = node()
    use(made, "uid-a", 1.0, GIB)
    for uuid, minor, percent, used in (("GPU-b", "1", 80.9, 6 * GIB), ("GPU-a", "0", 10, GIB)):
        made.constant(Series(Metric.NODE_GPU_CORE, uuid, minor), percent)
        made.constant(Series(Metric.NODE_GPU_MEMORY, uuid, minor), used)
    made.constant(Series(Metric.POD_GPU_CORE, "uid-a", "GPU-b/1"), 30)
    made.constant(Series(Metric.POD_GPU_MEMORY, "uid-a", "GPU-b/1"), 2 * GIB)
    gpus = {"GPU-a": Gpu(0, 8 * GIB), "GPU-b": Gpu(1, 8 * GIB, healthy=False)}
    found = as_json(node_metric_status(made, (pod("a"),), (), SHORT, wall_s=WALL, gpus=gpus))

    def entry(uuid: str, minor: int, health: bool, *shown: str) -> dict[str, Any]:
        names = ("gpu-core", "gpu-memory", "gpu-memory-ratio")
        resources = {f"koordinator.sh/{n}": v for n, v in zip(names, shown, strict=True)}
        return {"type": "gpu", "id": uuid, "minor": minor, "health": health, "resources": resources}

    expected = [
        entry("GPU-a", 0, True, "10", "1Gi", "12"),
        entry("GPU-b", 1, False, "80", "6Gi", "75"),
    ]
    assert found["nodeMetric"]["nodeUsage"]["devices"] == expected
    pods = found["podsMetric"][0]["podUsage"]["devices"]
    assert pods[0]["resources"] == {
        "koordinator.sh/gpu-core": "30",
        "koordinator.sh/gpu-memory": "2Gi",
        "koordinator.sh/gpu-memory-ratio": "25",
    }


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e15)), max_size=10),
    st.floats(0, 1e4),
    st.floats(0, 1e15),
)
def test_every_amount_is_that_of_a_sample_rounded_down(
    pods: list[tuple[float, float]], cpu: float, memory: float
) -> None:
    made = node(cpu, memory, over_s=3)
    for number, (cores, used) in enumerate(pods):
        use(made, f"uid-{number}", cores, used)
    status = node_metric_status(
        made, [pod(str(number)) for number in range(len(pods))], (), SHORT, wall_s=WALL
    )
    assert len(status.pods_metric) == len(pods)
    for each in status.pods_metric:
        cores, used = pods[int(each.name)]
        shown = each.pod_usage.resources
        assert abs(shown["cpu"].milli_value() - cores * 1000) <= 1 + cores * 1e-6
        assert abs(shown["memory"].value() - used) <= 1 + used * 1e-9
        assert shown["cpu"].nano >= 0


# --- the spec ------------------------------------------------------------------------------------


def policy(**fields: Any) -> tuple[Policy, tuple[str, ...]]:
    return policy_of(NodeMetricSpec(NodeMetricCollectPolicy(**fields)))


def test_a_spec_without_policy_has_upstreams_defaults() -> None:
    expected = Policy(60.0, 300.0, ("5m0s", "10m0s", "30m0s"), "usageWithoutPageCache")
    assert policy_of(NodeMetricSpec()) == (expected, ())
    assert policy() == (expected, ())


def test_given_fields_count_within_their_bounds() -> None:
    found, problems = policy(
        report_interval_seconds=10,
        aggregate_duration_seconds=10,
        node_aggregate_policy=AggregatePolicy(("90s", "1h")),
        node_memory_collect_policy="usageWithPageCache",
    )
    assert (found, problems) == (
        Policy(30.0, 60.0, ("1m30s", "1h0m0s"), "usageWithPageCache"),
        (),
    )
    assert policy(report_interval_seconds=10**9)[0].report_interval_s == 86400


def test_a_duration_beyond_what_is_kept_is_named_and_cut() -> None:
    found, problems = policy(aggregate_duration_seconds=900)
    assert (found.aggregate_s, problems) == (900.0, ())
    found, problems = policy(aggregate_duration_seconds=7200)
    assert found.aggregate_s == 1800.0
    assert problems == (
        "spec.metricCollectPolicy.aggregateDurationSeconds: 7200: longer than the 1800 s for which"
        " samples are kept; that many seconds count",
    )


def test_bad_fields_are_named_and_the_others_hold() -> None:
    found, problems = policy(
        report_interval_seconds=120,
        node_aggregate_policy=AggregatePolicy(("5m", "soon", "-1m")),
        node_memory_collect_policy="all",
    )
    assert found == Policy(120.0, 300.0, ("5m0s",), "usageWithoutPageCache")
    assert problems == (
        "spec.metricCollectPolicy.nodeAggregatePolicy.durations: 'soon': not a duration such as"
        " 30s, 5m or 1h30m",
        "spec.metricCollectPolicy.nodeAggregatePolicy.durations: '-1m': must be longer than 0",
        "spec.metricCollectPolicy.nodeMemoryCollectPolicy: 'all': not one of"
        " usageWithHotPageCache, usageWithoutPageCache, usageWithPageCache",
    )


def test_durations_that_are_all_bad_count_as_missing() -> None:
    found, problems = policy(node_aggregate_policy=AggregatePolicy(("soon",)))
    assert found.windows == Policy().windows != ()
    assert len(problems) == 1


def test_a_gpu_without_samples_of_both_is_left_out() -> None:
    made = node()
    use(made, "uid-a", 1.0, GIB)
    made.constant(Series(Metric.NODE_GPU_CORE, "GPU-a", "0"), 10)
    made.constant(Series(Metric.POD_GPU_CORE, "uid-a", "GPU-a/0"), 10)
    made.constant(Series(Metric.POD_GPU_MEMORY, "uid-a", "GPU-b/1"), GIB)
    found = report(made, pod("a"))
    assert "devices" not in found["nodeMetric"]["nodeUsage"]
    assert "devices" not in found["podsMetric"][0]["podUsage"]
