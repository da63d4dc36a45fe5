"""What plugins work out for one row without NumPy equals what they work out for all rows."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.decode import json_decoder
from apis.nodemetric import NodeMetric
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.plugins.contract import RowFilter, RowScore
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.numa.facts import NumaFacts
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, chart_profile, file
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts, put

_NOW = 1_800_000_000.0
_NODES = 6
_IGNORES = {"scheduling.koordinator.sh/reservation-ignored": "true"}
_decode = json_decoder(NodeMetric)


def _plugins(random: Random, tables: Tables) -> Plugins:
    most = random.choice(("MostAllocated", "LeastAllocated"))
    weights = [{"name": "cpu", "weight": random.randint(1, 3)}, {"name": "memory", "weight": 1}]
    extended = [{"name": "test.io/part", "weight": 2}] if random.random() < 0.5 else []
    profile = chart_profile()
    profile["pluginConfig"] = [
        args("NodeResourcesFit", scoringStrategy={"type": most, "resources": weights + extended}),
        args(
            "NodeResourcesBalancedAllocation",
            resources=[{"name": each["name"], "weight": 1} for each in weights + extended],
        ),
        args("NodeNUMAResource", scoringStrategy={"type": most, "resources": weights}),
        args(
            "LoadAwareScheduling",
            filterExpiredNodeMetrics=random.random() < 0.8,
            enableScheduleWhenNodeMetricsExpired=random.random() < 0.5,
            dominantResourceWeight=random.choice((0, 3)),
            scoreAccordingProdUsage=random.random() < 0.5,
            usageThresholds=random.choice(({}, {"cpu": 40}, {"cpu": 60, "memory": 30})),
            prodUsageThresholds=random.choice(({}, {"cpu": 30, "memory": 50})),
            aggregated=random.choice(
                (
                    None,
                    {
                        "usageThresholds": {"cpu": 35},
                        "usageAggregationType": "p95",
                        "usageAggregatedDuration": "5m",
                    },
                )
            ),
        ),
    ]
    text = json.dumps(file(profiles=[profile]))
    return make_plugins(read_configuration(text, obj="test"), tables)


def _metric(random: Random) -> NodeMetric:
    usage = {"resources": {"cpu": str(random.randint(0, 20)), "memory": "9Gi"}}
    minute = random.choice(("00", "50"))
    pods = [
        {
            "namespace": "default",
            "name": f"p{number}",
            "podUsage": {"resources": {"cpu": "3"}},
            "priority": "koord-prod",
        }
        for number in range(random.randint(0, 4))
    ]
    status = {
        "updateTime": f"2027-01-15T07:{minute}:00Z" if minute == "50" else "2027-01-15T08:00:00Z",
        "nodeMetric": {"nodeUsage": usage},
        "podsMetric": pods,
    }
    return _decode(msgspec.json.encode({"metadata": {}, "status": status}))


def _node(random: Random, name: str) -> Any:
    amounts = {"cpu": random.choice(("0", "16", "20")), "pods": random.choice(("3", "110"))}
    if random.random() < 0.5:
        amounts["test.io/part"] = random.choice(("0", "4"))
    return make_node(name, allocatable=amounts)


def _shape(random: Random, shapes: Shapes) -> PodShape:
    requests = {"cpu": random.choice(("0", "1", "7", "18")), "memory": "1Gi"}
    if random.random() < 0.3:
        requests = random.choice(({}, {"test.io/part": "3"}, requests | {"test.io/part": "5"}))
    labels = {"app": random.choice("ab"), "koordinator.sh/qosClass": random.choice(("LS", "LSR"))}
    labels |= random.choice(({}, {}, _IGNORES))
    priority = random.choice((0, 9500))
    return shapes.of(make_pod("p", requests=requests, labels=labels, priority=priority))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_one_row_has_what_all_rows_have(seed: int) -> None:
    random = Random(seed)
    tables, shapes = Tables(), Shapes()
    plugins = _plugins(random, tables)
    for load in plugins.loads:
        load.advance(_NOW)
    for number in range(_NODES):
        row = tables.upsert_node(_node(random, f"n{number}"))
        for load in plugins.loads:
            load.set_report(row, random.choice((None, _metric(random), _metric(random))))
        if random.random() < 0.2:
            plugins.numa.set_node(row, NumaFacts(cpu_ratio=150))
    for number in range(random.randint(0, 12)):
        node = f"n{random.randint(0, _NODES - 1)}"
        shape = _shape(random, shapes)
        tables.place(Booking(f"default/p{number}", f"u{number}", shape, node, start=_NOW))
    for name in ("r", "s"):
        if random.random() < 0.4:
            node = random.choice(("n0", "n1"))
            put(tables, shapes, make_facts(name, {"cpu": "6"}), node, {"cpu": "6"})
    profile = plugins.profiles["koord-scheduler"]
    every = slice(0, len(tables.nodes))
    rows = range(len(tables.nodes))
    for shape in (_shape(random, shapes) for _ in range(4)):
        for plugin in profile.filters:
            if isinstance(plugin, RowFilter) and plugin.applies(shape, tables):
                mask = plugin.filter(shape, tables, every).tolist()
                assert [plugin.filter_row(shape, tables, row) for row in rows] == mask, plugin.name
        for score, _ in profile.scores:
            if isinstance(score, RowScore) and score.applies(shape, tables):
                raw = score.score(shape, tables, every).tolist()
                assert [score.score_row(shape, tables, row) for row in rows] == raw, score.name


def test_the_plugins_of_every_pod_work_out_one_row() -> None:
    tables = Tables()
    profile = _plugins(Random(0), tables).profiles["koord-scheduler"]
    filters = {each.name for each in profile.filters if isinstance(each, RowFilter)}
    scores = {each.name for each, _ in profile.scores if isinstance(each, RowScore)}
    assert filters == {"NodeResourcesFit", "LoadAwareScheduling", "NodeNUMAResource"}
    assert scores == filters | {"NodeResourcesBalancedAllocation"}
