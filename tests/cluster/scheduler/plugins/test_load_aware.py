"""LoadAwareScheduling: examples of the estimate, thresholds and scores; exact bookkeeping."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.decode import json_decoder
from apis.nodemetric import NodeMetric
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.plugins.resources.load_aware import LoadAwareScheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.load import LoadSettings, LoadTable
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, chart_profile, file
from tests.cluster.scheduler.making import make_node, make_pod

_NOW = 1_800_000_000.0
_UPDATED = "2027-01-15T08:00:00Z"
_GIB = 1024**3
_decode = json_decoder(NodeMetric)


def _metric(
    cpu: str,
    memory: str = "0",
    *,
    pods: dict[str, tuple[str, str]] | None = None,
    windows: dict[str, dict[str, str]] | None = None,
    updated: str = _UPDATED,
) -> NodeMetric:
    """pods: name -> (cpu, priority class). windows: duration -> percentile -> cpu."""
    return _decode(
        msgspec.json.encode(
            {
                "metadata": {"name": "n"},
                "status": {
                    "updateTime": updated,
                    "nodeMetric": {
                        "nodeUsage": {"resources": {"cpu": cpu, "memory": memory}},
                        "aggregatedNodeUsages": [
                            {
                                "duration": duration,
                                "usage": {p: {"resources": {"cpu": c}} for p, c in usage.items()},
                            }
                            for duration, usage in (windows or {}).items()
                        ],
                    },
                    "podsMetric": [
                        {
                            "namespace": "default",
                            "name": name,
                            "priority": priority,
                            "podUsage": {"resources": {"cpu": used}},
                        }
                        for name, (used, priority) in (pods or {}).items()
                    ],
                },
            }
        )
    )


class _Node:
    """One node of 32 cores and 128 GiB with a load table."""

    def __init__(self, settings: LoadSettings | None = None, **annotations: str) -> None:
        self.tables = Tables()
        self.load = LoadTable(self.tables.nodes, settings or LoadSettings())
        self.tables.add_node_part(self.load)
        self.shapes = Shapes()
        self.load.advance(_NOW)
        self.row = self.tables.upsert_node(
            make_node(
                "n",
                allocatable={"cpu": "32", "memory": "128Gi"},
                annotations={
                    f"scheduling.koordinator.sh/{key.replace('_', '-')}": text
                    for key, text in annotations.items()
                },
            )
        )
        self.plugin = LoadAwareScheduling(self.load)

    def place(self, name: str, *, start: float = _NOW, priority: int = 9500, **spec: Any) -> None:
        shape = self.shapes.of(make_pod(name, priority=priority, **spec))
        booking = Booking(key=f"default/{name}", uid=name, shape=shape, node="n", start=start)
        self.tables.place(booking)

    def reasons(self, *, priority: int = 9500, **spec: Any) -> list[str]:
        shape = self.shapes.of(make_pod("p", priority=priority, **spec))
        mask = int(self.plugin.filter(shape, self.tables, np.array([self.row]))[0])
        reasons = self.plugin.reasons(shape)
        return [reason.text for number, reason in enumerate(reasons) if mask >> number & 1]

    def score(self, *, priority: int = 9500, **spec: Any) -> int:
        shape = self.shapes.of(make_pod("p", priority=priority, **spec))
        return int(self.plugin.score(shape, self.tables, np.array([self.row]))[0])


@pytest.mark.parametrize(
    ("spec", "cpu", "memory"),
    [
        pytest.param(
            {
                "requests": {"cpu": "2", "memory": "8Gi"},
                "limits": {"cpu": "4", "memory": "8Gi"},
            },
            3400,
            6012954214,
            id="the larger of request and limit, times the factor",
        ),
        pytest.param({}, 250, 200 * 1024**2, id="neither request nor limit"),
        pytest.param(
            {
                "priority": 5500,
                "requests": {"kubernetes.io/batch-cpu": "1000", "cpu": "9"},
            },
            850,
            200 * 1024**2,
            id="batch pods by their own resources",
        ),
        pytest.param({"priority": 3500}, 250, 200 * 1024**2, id="free pods count too"),
        pytest.param({"priority": 7500}, 250, 200 * 1024**2, id="mid pods without mid resources"),
    ],
)
def test_estimates(spec: dict[str, Any], cpu: int, memory: int) -> None:
    node = _Node()
    shape = node.shapes.of(make_pod("p", **{"priority": 9500, **spec}))
    assert node.load.estimate(shape).tolist() == [cpu, memory]


def test_the_estimate_is_at_most_the_limit() -> None:
    node = _Node(LoadSettings(factors={"cpu": 100, "memory": 100}))
    shape = node.shapes.of(make_pod("p", requests={"cpu": "2"}, limits={"cpu": "1"}, priority=9500))
    assert node.load.estimate(shape)[0] == 1000


def test_a_node_above_its_threshold_is_held_back_and_one_at_it_is_not() -> None:
    node = _Node()
    node.place("running", limits={"cpu": "1"}, requests={"cpu": "1"})
    spec: dict[str, Any] = {"requests": {"cpu": "4"}}
    node.load.set_report(node.row, _metric("18150m"))  # + 850 estimated
    assert node.reasons(**spec) == ["node(s) cpu usage exceed threshold"]
    node.load.set_report(node.row, _metric("16550m"))  # 20,800 of 32,000 is 65 %
    assert node.reasons(**spec) == []


def test_a_pod_that_the_report_shows_counts_with_its_usage_only() -> None:
    node = _Node()
    node.place("old", start=_NOW - 3600, requests={"cpu": "8"})
    node.place("new", start=_NOW, requests={"cpu": "8"})
    metric = _metric("10", pods={"old": ("6", "koord-prod"), "new": ("1", "koord-prod")})
    node.load.set_report(node.row, metric)
    # Only the new pod adds what its estimate of 6,800 m exceeds the shown 1,000 m by.
    assert node.load.delta[node.row, 0] == 5800
    assert node.load.estimated[node.row, 0] == 13600
    assert node.load.prod_usage[node.row, 0] == 7000
    assert node.load.prod_delta[node.row, 0] == 5800


def test_a_prod_pod_that_the_report_shows_with_another_class_counts_by_its_estimate() -> None:
    node = _Node()
    node.place("p", start=_NOW - 3600, requests={"cpu": "8"})
    node.load.set_report(node.row, _metric("10", pods={"p": ("6", "koord-batch")}))
    assert node.load.prod_usage[node.row, 0] == 0
    assert node.load.prod_delta[node.row, 0] == 6800
    assert node.load.delta[node.row, 0] == 0


def test_without_a_report_a_node_passes_and_is_scored_by_estimates() -> None:
    node = _Node()
    node.place("p", requests={"cpu": "16", "memory": "64Gi"}, limits={"cpu": "400"})
    assert node.reasons() == []
    empty = _Node()
    assert empty.score() > node.score()


def test_an_expired_report_holds_back_unless_configured_otherwise() -> None:
    node = _Node()
    node.load.set_report(node.row, _metric("1"))
    assert node.reasons() == []
    before = node.tables.nodes.version
    node.load.advance(_NOW + 181)
    assert node.tables.nodes.changed_since(before).tolist() == [node.row]
    assert node.reasons() == ["node(s) nodeMetric expired"]
    node.plugin = replace(node.plugin, pass_expired=True)
    assert node.reasons() == []
    node.plugin = replace(node.plugin, pass_expired=False, hold_back_expired=False)
    assert node.reasons() == []
    node.load.set_report(node.row, _metric("30", updated="2020-01-01T00:00:00Z"))
    assert node.reasons() == ["node(s) cpu usage exceed threshold"]


def test_pods_of_daemon_sets_pass() -> None:
    node = _Node()
    node.load.set_report(node.row, _metric("31"))
    pod = make_pod("d")
    owner = {"kind": "DaemonSet", "name": "d", "uid": "1", "controller": True, "apiVersion": "v1"}
    document = msgspec.json.decode(msgspec.json.encode({"metadata": {}, "spec": {}}))
    document["metadata"] = {"name": "d", "namespace": "default", "ownerReferences": [owner]}
    document["spec"] = {"containers": [{"name": "c"}]}
    daemon = json_decoder(type(pod))(msgspec.json.encode(document))
    mask = node.plugin.filter(node.shapes.of(daemon), node.tables, np.array([node.row]))
    assert mask.tolist() == [0]
    assert node.reasons() == ["node(s) cpu usage exceed threshold"]


def test_thresholds_of_the_node_replace_those_of_the_configuration() -> None:
    node = _Node(usage_thresholds='{"usageThresholds":{"cpu":95}}')
    node.load.set_report(node.row, _metric("28"))
    assert node.reasons() == []
    strict = _Node(usage_thresholds='{"prodUsageThresholds":{"cpu":10}}')
    strict.place("p", start=_NOW, requests={"cpu": "4"})
    strict.load.set_report(strict.row, _metric("1"))
    assert strict.reasons() == ["node(s) cpu usage exceed threshold"]
    assert strict.reasons(priority=5500) == []


def test_a_percentile_of_the_node_is_compared_with_its_own_thresholds() -> None:
    node = _Node(
        usage_thresholds='{"aggregatedUsage":{"usageThresholds":{"cpu":50},'
        '"usageAggregationType":"p95","usageAggregatedDuration":"5m"}}'
    )
    windows = {"5m": {"p95": "20"}, "10m": {"p95": "2"}}
    node.load.set_report(node.row, _metric("1", windows=windows))
    assert node.reasons() == ["node(s) cpu aggregated usage exceed threshold"]
    node.load.set_report(node.row, _metric("1", windows={"10m": {"p95": "2"}}))
    assert node.reasons() == []


def test_a_malformed_annotation_leaves_the_configuration_in_force_and_is_named() -> None:
    node = _Node(usage_thresholds='{"usageThresholds":{"cpu":"many"}}')
    node.load.set_report(node.row, _metric("31"))
    assert node.reasons() == ["node(s) cpu usage exceed threshold"]
    problem = str(node.load.problems["n"])
    assert "Node n" in problem
    assert "usageThresholds" in problem


def test_scores() -> None:
    node = _Node()
    node.load.set_report(node.row, _metric("19", "35433480192"))  # 33 GiB
    spec: dict[str, Any] = {"requests": {"cpu": "4", "memory": "10Gi"}}  # 3,400 m, 7 GiB
    assert node.score(**spec) == 49
    node.plugin = replace(node.plugin, dominant_weight=1)
    assert node.score(**spec) == 42


def test_negative_usage_counts_as_none() -> None:
    node = _Node()
    node.load.set_report(node.row, _metric("-5"))
    assert node.load.base[node.row, 0] == 0


def test_absurd_limits_of_many_pods_do_not_make_a_node_look_idle() -> None:
    node = _Node()
    node.load.set_report(node.row, _metric("1"))
    for number in range(100):
        node.place(f"p{number}", limits={"memory": "8E"})
        assert "node(s) memory usage exceed threshold" in node.reasons()
        assert node.score() <= 48


_POD_STEPS = st.tuples(
    st.sampled_from(["place", "remove", "report", "node", "none"]),
    st.integers(0, 4),
    st.integers(0, 2),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(_POD_STEPS, max_size=25))
def test_columns_depend_on_what_is_there_and_not_on_its_history(
    steps: list[tuple[str, int, int]],
) -> None:
    node = _Node(LoadSettings(prod_includes_system=True))
    reports = [
        _metric("10", pods={"p0": ("1", "koord-prod"), "p1": ("2", "")}),
        _metric("3", pods={"p2": ("100m", "koord-prod")}),
        None,
    ]
    report = None
    placed: dict[str, tuple[int, int]] = {}
    for kind, number, variant in steps:
        name = f"p{number}"
        if kind == "place":
            placed[name] = (number, variant)
            node.place(
                name,
                start=_NOW - 3600 * variant,
                priority=9500 if number % 2 else 5500,
                requests={"cpu": str(variant), "kubernetes.io/batch-cpu": "700"},
            )
        elif kind == "remove":
            placed.pop(name, None)
            node.tables.remove(name)
        elif kind == "report":
            report = reports[variant]
            node.load.set_report(node.row, report)
        elif kind == "node":
            node.tables.delete_node("n")
            node.row = node.tables.upsert_node(
                make_node("n", allocatable={"cpu": "32", "memory": "128Gi"})
            )
            report = None
    anew = _Node(LoadSettings(prod_includes_system=True))
    anew.load.set_report(anew.row, report)
    for name, (number, variant) in placed.items():
        anew.place(
            name,
            start=_NOW - 3600 * variant,
            priority=9500 if number % 2 else 5500,
            requests={"cpu": str(variant), "kubernetes.io/batch-cpu": "700"},
        )
    for column in ("base", "delta", "prod_usage", "prod_delta", "estimated", "reported"):
        found = getattr(node.load, column)[node.row]
        assert np.array_equal(found, getattr(anew.load, column)[anew.row]), column


def test_profiles_with_equal_windows_of_usage_share_a_table() -> None:
    def loads(*durations: str) -> int:
        profiles = []
        for number, duration in enumerate(durations):
            aggregated = {"usageAggregationType": "p95", "usageAggregatedDuration": duration}
            profile = chart_profile(f"s{number}")
            profile["pluginConfig"] = [args("LoadAwareScheduling", aggregated=aggregated)]
            profiles.append(profile)
        configuration = read_configuration(json.dumps(file(profiles=profiles)), obj="test")
        return len(make_plugins(configuration, Tables()).loads)

    assert loads("5m", "300s") == 1
    assert loads("5m", "10m") == 2
