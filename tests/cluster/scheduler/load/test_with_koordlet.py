"""A NodeMetric as koordlet reports it is read by the load table field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from apis.decode import encode, json_decoder
from apis.keys import LABEL_QOS_CLASS
from apis.nodemetric import NodeMetric
from apis.qos import KubeQoS, QoSClass
from cluster.scheduler.tables.load import LoadSettings
from hooks.subject import HostAppSubject, Pod, make_pod
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from koordlet.reporters.node_metric import node_metric_status, policy_of
from tests.cluster.scheduler.load.making import NOW, LoadNode

_MIB, _GIB = 2**20, 2**30
_decode = json_decoder(NodeMetric)
_UPTIME = 50_000.0
"""The node's monotonic clock, which its samples have."""
_SPEC = {
    "metricCollectPolicy": {
        "aggregateDurationSeconds": 60,
        "reportIntervalSeconds": 30,
        "nodeAggregatePolicy": {"durations": ["5m", "15m", "2h"]},
    }
}


def _measured(seconds: int) -> Store:
    """Return the samples of a node: ten seconds of 20 cores in each minute, else 8."""
    store = Store()
    store.add_table("all", interval_s=1.0, retention_s=3600.0)
    for age in range(seconds, -1, -1):
        store.record(
            "all",
            _UPTIME - age,
            {
                Series(Metric.NODE_CPU): 20.0 if 0 < age % 60 <= 10 else 8.0,
                Series(Metric.NODE_MEMORY): 40.0 * _GIB,
                Series(Metric.SYSTEM_CPU): 0.5,
                Series(Metric.SYSTEM_MEMORY): 3.0 * _GIB,
                Series(Metric.POD_CPU, "uid-web"): 2.25,
                Series(Metric.POD_MEMORY, "uid-web"): 5.0 * _GIB,
                Series(Metric.POD_CPU, "uid-sort"): 3.0,
                Series(Metric.POD_MEMORY, "uid-sort"): 512.0 * _MIB,
                Series(Metric.HOST_APP_CPU, "nginx"): 0.25,
                Series(Metric.HOST_APP_MEMORY, "nginx"): 1.0 * _MIB,
            },
        )
    return store


def _pod(name: str, *, priority: int | None = None, qos: str = "LS") -> Pod:
    return make_pod(
        namespace="default",
        name=name,
        uid=f"uid-{name}",
        labels={LABEL_QOS_CLASS: qos},
        annotations={},
        kube_qos=KubeQoS.BURSTABLE,
        priority=priority,
    )


def _reported(seconds: int = 1800, *, age: float = 0.0) -> NodeMetric:
    """Return the object that the API server has after koordlet's report, `age` seconds ago."""
    wire: dict[str, Any] = {"metadata": {"name": "n"}, "spec": _SPEC}
    policy, problems = policy_of(_decode(msgspec.json.encode(wire)).spec)
    assert problems == ()
    status = node_metric_status(
        _measured(seconds).view(_UPTIME),
        (_pod("web", priority=9500), _pod("sort", qos="BE"), _pod("unmeasured")),
        (HostAppSubject("nginx", QoSClass.LS, "host-latency-sensitive/nginx", "koord-prod"),),
        policy,
        wall_s=NOW - age,
    )
    return _decode(msgspec.json.encode(wire | {"status": msgspec.json.decode(encode(status))}))


def _node(**settings: Any) -> LoadNode:
    """Return a node with a prod pod that requests 4 cores and a batch pod of 2."""
    node = LoadNode(LoadSettings(**settings))
    node.place("web", start=NOW - 3600, requests={"cpu": "4", "memory": "8Gi"})
    batch = {"kubernetes.io/batch-cpu": "2000", "kubernetes.io/batch-memory": "1Gi"}
    node.place("sort", start=NOW - 3600, priority=5500, requests=batch)
    return node


# 10 of 60 seconds with 20 cores: (10 * 20 + 51 * 8) / 61 over the last 61 samples.
_AVERAGE = 9967


def test_a_report_is_read_field_by_field() -> None:
    node = _node(prod_includes_system=True, score_window=("p95", 300))
    node.load.set_report(node.row, _reported())
    of = {
        name: getattr(node.load, name)[node.row].tolist()
        for name in ("base", "score_base", "prod_usage", "delta", "prod_delta", "estimated")
    }
    assert of == {
        "base": [_AVERAGE, 40 * _GIB],
        "score_base": [20_000, 40 * _GIB],
        "prod_usage": [500 + 2250, (3 + 5) * _GIB],
        "delta": [0, 0],
        "prod_delta": [0, 0],
        "estimated": [3400 + 1700, 6012954214 + 751619277],
    }
    assert node.load.reported[node.row] and not node.load.expired[node.row]


def test_a_pod_counts_by_its_estimate_until_a_report_one_interval_after_its_start() -> None:
    node = _node()
    node.place("web", start=NOW - 29, requests={"cpu": "4", "memory": "8Gi"})
    node.place("unmeasured", start=NOW - 3600, requests={"cpu": "1"})
    node.load.set_report(node.row, _reported())
    unmeasured = [850, 200 * _MIB]
    web = [3400 - 2250, 6012954214 - 5 * _GIB]
    expected = [one + other for one, other in zip(unmeasured, web, strict=True)]
    assert node.load.delta[node.row].tolist() == expected
    assert node.load.prod_delta[node.row].tolist() == expected
    node.load.set_report(node.row, _reported(age=-2))
    assert node.load.delta[node.row].tolist() == unmeasured


@pytest.mark.parametrize(
    ("window", "cpu"),
    [
        (("p95", 300), 20_000),
        (("p50", 300), 8_000),
        (("p90", 900), 20_000),
        (("p95", 0), 20_000),
        (("p95", 7200), _AVERAGE),  # half an hour of samples spans too little of it
    ],
)
def test_windows_are_found_by_percentile_and_length(window: tuple[str, int], cpu: int) -> None:
    node = _node(aggregated_thresholds={"cpu": 60}, filter_window=window)
    node.load.set_report(node.row, _reported())
    assert node.load.base[node.row, 0] == cpu
    exceeded = ["node(s) cpu aggregated usage exceed threshold"]
    assert node.reasons() == (exceeded if cpu == 20_000 else [])


def test_the_decision_is_that_of_the_formula() -> None:
    node = _node()
    node.load.set_report(node.row, _reported())
    # (9,967 + 85 % of 12,000) / 32,000 is 63 %, of 14,000 68 %.
    assert node.reasons(requests={"cpu": "12"}) == []
    assert node.reasons(requests={"cpu": "14"}) == ["node(s) cpu usage exceed threshold"]
    # cpu (32,000 - 20,167) / 32,000: 36; memory (128 - 40 - 0.1953) / 128: 68.
    assert node.score(requests={"cpu": "12"}) == (36 + 68) // 2
    node.plugin = replace(node.plugin, score_by_prod=True)
    # cpu (32,000 - 2,250 - 10,200) / 32,000: 61; memory (128 - 5 - 0.1953) / 128: 95.
    assert node.score(requests={"cpu": "12"}) == (61 + 95) // 2


def test_the_first_report_of_a_node_counts_although_no_window_has_data_yet() -> None:
    node = _node(aggregated_thresholds={"cpu": 60}, filter_window=("p95", 300))
    node.load.set_report(node.row, _reported(0))
    assert node.load.base[node.row].tolist() == [8000, 40 * _GIB]
    assert node.load.delta[node.row].tolist() == [0, 0]
