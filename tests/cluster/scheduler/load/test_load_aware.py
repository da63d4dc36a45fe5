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
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.load import LoadSettings, LoadTable
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, chart_profile, enabled, file, load
from tests.cluster.scheduler.load.making import NOW, LoadNode, make_metric
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import reserve_shape


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
    node = LoadNode()
    shape = node.shapes.of(make_pod("p", **{"priority": 9500, **spec}))
    assert node.load.estimate(shape).tolist() == [cpu, memory]


def test_the_estimate_is_at_most_the_limit() -> None:
    node = LoadNode(LoadSettings(factors={"cpu": 100, "memory": 100}))
    shape = node.shapes.of(make_pod("p", requests={"cpu": "2"}, limits={"cpu": "1"}, priority=9500))
    assert node.load.estimate(shape)[0] == 1000


def test_a_node_above_its_threshold_is_held_back_and_one_at_it_is_not() -> None:
    node = LoadNode()
    node.place("running", limits={"cpu": "1"}, requests={"cpu": "1"})
    spec: dict[str, Any] = {"requests": {"cpu": "4"}}
    node.load.set_report(node.row, make_metric("18150m"))  # + 850 estimated
    assert node.reasons(**spec) == ["node(s) cpu usage exceed threshold"]
    node.load.set_report(node.row, make_metric("16550m"))  # 20,800 of 32,000 is 65 %
    assert node.reasons(**spec) == []


def test_a_pod_that_the_report_shows_counts_with_its_usage_only() -> None:
    node = LoadNode()
    node.place("old", start=NOW - 3600, requests={"cpu": "8"})
    node.place("new", start=NOW, requests={"cpu": "8"})
    metric = make_metric("10", pods={"old": ("6", "koord-prod"), "new": ("1", "koord-prod")})
    node.load.set_report(node.row, metric)
    # Only the new pod adds what its estimate of 6,800 m exceeds the shown 1,000 m by.
    assert node.load.delta[node.row, 0] == 5800
    assert node.load.estimated[node.row, 0] == 13600
    assert node.load.prod_usage[node.row, 0] == 7000
    assert node.load.prod_delta[node.row, 0] == 5800


def test_a_prod_pod_that_the_report_shows_with_another_class_counts_by_its_estimate() -> None:
    node = LoadNode()
    node.place("p", start=NOW - 3600, requests={"cpu": "8"})
    node.load.set_report(node.row, make_metric("10", pods={"p": ("6", "koord-batch")}))
    assert node.load.prod_usage[node.row, 0] == 0
    assert node.load.prod_delta[node.row, 0] == 6800
    assert node.load.delta[node.row, 0] == 0


def test_without_a_report_a_node_passes_and_is_scored_by_estimates() -> None:
    node = LoadNode()
    node.place("p", requests={"cpu": "16", "memory": "64Gi"}, limits={"cpu": "400"})
    assert node.reasons() == []
    empty = LoadNode()
    assert empty.score() > node.score()


def test_an_expired_report_holds_back_unless_configured_otherwise() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("1"))
    assert node.reasons() == []
    before = node.tables.nodes.version
    node.load.advance(NOW + 181)
    assert node.tables.nodes.changed_since(before).tolist() == [node.row]
    assert node.reasons() == ["node(s) nodeMetric expired"]
    node.plugin = replace(node.plugin, pass_expired=True)
    assert node.reasons() == []
    node.plugin = replace(node.plugin, pass_expired=False, hold_back_expired=False)
    assert node.reasons() == []
    node.load.set_report(node.row, make_metric("30", updated="2020-01-01T00:00:00Z"))
    assert node.reasons() == ["node(s) cpu usage exceed threshold"]


def test_pods_of_daemon_sets_pass() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("31"))
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
    node = LoadNode(usage_thresholds='{"usageThresholds":{"cpu":95}}')
    node.load.set_report(node.row, make_metric("28"))
    assert node.reasons() == []
    strict = LoadNode(usage_thresholds='{"prodUsageThresholds":{"cpu":10}}')
    strict.place("p", start=NOW, requests={"cpu": "4"})
    strict.load.set_report(strict.row, make_metric("1"))
    assert strict.reasons() == ["node(s) cpu usage exceed threshold"]
    assert strict.reasons(priority=5500) == []


def test_a_percentile_of_the_node_is_compared_with_its_own_thresholds() -> None:
    node = LoadNode(
        usage_thresholds='{"aggregatedUsage":{"usageThresholds":{"cpu":50},'
        '"usageAggregationType":"p95","usageAggregatedDuration":"5m"}}'
    )
    windows = {"5m": {"p95": "20"}, "10m": {"p95": "2"}}
    node.load.set_report(node.row, make_metric("1", windows=windows))
    assert node.reasons() == ["node(s) cpu aggregated usage exceed threshold"]
    node.load.set_report(node.row, make_metric("1", windows={"10m": {"p95": "2"}}))
    assert node.reasons() == []


def test_a_malformed_annotation_leaves_the_configuration_in_force_and_is_named() -> None:
    node = LoadNode(usage_thresholds='{"usageThresholds":{"cpu":"many"}}')
    node.load.set_report(node.row, make_metric("31"))
    assert node.reasons() == ["node(s) cpu usage exceed threshold"]
    problem = str(node.load.problems(node.row)[0])
    assert "Node n" in problem
    assert "usageThresholds" in problem


def test_scores() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("19", "35433480192"))  # 33 GiB
    spec: dict[str, Any] = {"requests": {"cpu": "4", "memory": "10Gi"}}  # 3,400 m, 7 GiB
    assert node.score(**spec) == 49
    node.plugin = replace(node.plugin, dominant_weight=1)
    assert node.score(**spec) == 42


def test_negative_usage_counts_as_none() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("-5"))
    assert node.load.base[node.row, 0] == 0


def test_absurd_limits_of_many_pods_do_not_make_a_node_look_idle() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("1"))
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
    node = LoadNode(LoadSettings(prod_includes_system=True))
    reports = [
        make_metric("10", pods={"p0": ("1", "koord-prod"), "p1": ("2", "")}),
        make_metric("3", pods={"p2": ("100m", "koord-prod")}),
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
                start=NOW - 3600 * variant,
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
    fresh = LoadNode(LoadSettings(prod_includes_system=True))
    fresh.load.set_report(fresh.row, report)
    for name, (number, variant) in placed.items():
        fresh.place(
            name,
            start=NOW - 3600 * variant,
            priority=9500 if number % 2 else 5500,
            requests={"cpu": str(variant), "kubernetes.io/batch-cpu": "700"},
        )
    for column in ("base", "delta", "prod_usage", "prod_delta", "estimated", "reported"):
        found = getattr(node.load, column)[node.row]
        assert np.array_equal(found, getattr(fresh.load, column)[fresh.row]), column


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


def test_a_node_whose_report_was_never_written_counts_as_expired_and_one_without_usage_passes() -> (
    None
):
    node = LoadNode()
    node.load.set_report(node.row, NodeMetric())
    assert node.reasons() == ["node(s) nodeMetric expired"]
    status = msgspec.structs.replace(make_metric("31").status, node_metric=None)
    node.load.set_report(node.row, NodeMetric(status=status))
    assert node.reasons() == []


def test_prod_thresholds_of_zero_except_prod_pods() -> None:
    node = LoadNode(usage_thresholds='{"prodUsageThresholds":{"cpu":0}}')
    node.load.set_report(node.row, make_metric("31"))
    assert node.reasons() == []
    assert node.reasons(priority=5500) == ["node(s) cpu usage exceed threshold"]


@pytest.mark.parametrize("report", [make_metric("1"), NodeMetric(), None])
def test_without_a_report_in_force_prod_pods_are_scored_by_all_estimates_too(
    report: NodeMetric | None,
) -> None:
    node = LoadNode()
    node.plugin = replace(node.plugin, score_by_prod=True)
    node.place("batch", priority=5500, requests={"kubernetes.io/batch-cpu": "30000"})
    node.load.set_report(node.row, report)
    node.load.advance(NOW + 3600)
    assert node.score() == node.score(priority=0)


def test_a_negative_limit_does_not_make_a_node_look_idle() -> None:
    node = LoadNode()
    shape = node.shape(requests={"cpu": "4"}, limits={"cpu": "-8", "memory": "-1"})
    assert node.load.estimate(shape).tolist() == [3400, 200 * 1024**2]


def test_both_bad_annotations_of_a_node_are_named_until_they_are_right_or_the_node_is_gone() -> (
    None
):
    node = LoadNode()
    bad = {
        "node.koordinator.sh/raw-allocatable": "many",
        "scheduling.koordinator.sh/usage-thresholds": "{",
    }
    node.tables.upsert_node(make_node("n", annotations=bad))
    assert ["raw" in str(e) for e in node.load.problems(node.row)] == [True, False]
    node.tables.upsert_node(make_node("n"))
    assert node.load.problems(node.row) == ()
    node.tables.upsert_node(make_node("n", annotations=bad))
    node.tables.delete_node("n")
    assert node.load.problems(node.row) == ()


def test_the_fullest_resource_alone_may_decide_the_score() -> None:
    node = LoadNode(LoadSettings(weights={}))
    node.plugin = replace(node.plugin, dominant_weight=1)
    node.load.set_report(node.row, make_metric("8", str(96 * 1024**3 - 1)))
    assert node.score(requests={"memory": "1"}, limits={"memory": "1"}) == 25


def test_without_a_report_all_that_is_known_of_a_node_are_estimates() -> None:
    node = LoadNode()
    node.place("prod", requests={"cpu": "4"})
    node.place("batch", priority=5500, requests={"kubernetes.io/batch-cpu": "2000"})
    columns = ("base", "delta", "prod_usage", "prod_delta", "estimated")
    cpu = [int(getattr(node.load, name)[node.row, 0]) for name in columns]
    assert cpu == [0, 3400 + 1700, 0, 3400, 3400 + 1700]


def test_reports_that_are_read_before_the_first_decision_have_not_expired() -> None:
    tables = Tables()
    load = LoadTable(tables.nodes, LoadSettings())
    tables.add_node_part(load)
    row = tables.upsert_node(make_node("n"))
    load.set_report(row, make_metric("1"))
    assert not load.expired[row]
    load.advance(NOW + 3600)
    assert load.expired[row]


def test_a_node_that_grows_or_shrinks_is_compared_with_what_it_has_now() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("20"))
    assert node.reasons() == []
    before = node.tables.nodes.version
    for cpu, reasons in (("16", ["node(s) cpu usage exceed threshold"]), ("32", [])):
        node.tables.upsert_node(make_node("n", allocatable={"cpu": cpu, "memory": "128Gi"}))
        assert node.reasons() == reasons
        assert node.tables.nodes.version > before
        before = node.tables.nodes.version


def test_settings_are_those_of_arguments_that_say_nothing() -> None:
    profile = {
        "schedulerName": "koord-scheduler",
        "plugins": {"filter": enabled("LoadAwareScheduling")},
    }
    (table,) = make_plugins(load(file(profiles=[profile])), Tables()).loads
    assert table.settings == LoadSettings()


def test_a_reservation_is_load_to_come_where_reservations_count() -> None:
    for counts in (True, False):
        node = LoadNode(LoadSettings(reservations=counts))
        shape = reserve_shape(node.shapes, {"cpu": "4"})
        reserve = Booking("default/uid-r", "uid-r", shape, "n")
        assert not node.load.has_reservations
        node.tables.place(reserve)
        node.place("p", requests={"cpu": "1"})
        assert node.load.has_reservations == counts
        share = node.load.reserved(node.row, "uid-r")
        assert (share is not None) == counts
        if share is not None:
            assert share.delta[0] == 3400 and share.estimated[0] == 3400
        assert node.load.reserved(node.row, "p") is None
        assert node.load.reserved(node.row + 1, "uid-r") is None
        assert {booking.uid for booking, _ in node.load.on(node.row)} == {"uid-r", "p"}
        assert node.load.delta[node.row, 0] == (3400 if counts else 0) + 850
        node.tables.remove("uid-r")
        assert not node.load.has_reservations
        assert node.load.delta[node.row, 0] == 850
        # What was never placed takes nothing.
        node.load.remove(reserve, node.row)
        assert node.load.delta[node.row, 0] == 850
