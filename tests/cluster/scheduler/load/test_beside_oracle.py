"""Filter, reasons and scores are those of the oracle at every step of a changing cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.decode import json_decoder
from apis.keys import ANNOTATION_RESERVE_POD
from apis.meta import format_time
from apis.nodemetric import NodeMetric
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.plugins.resources.load_aware import LoadAwareScheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, chart_profile, file
from tests.cluster.scheduler.load.oracle import Oracle, OracleNode, OraclePod
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts

Tree = dict[str, Any]

_NOW = 1_800_000_000
_NODES = ("n0", "n1", "n2")
_NAMES = tuple(f"p{number}" for number in range(6))
_RESERVATIONS = ("r", "s")
_ESTIMATED = "scheduling.koordinator.sh/load-estimated"
_IGNORES = {"scheduling.koordinator.sh/reservation-ignored": "true"}
_decode = json_decoder(NodeMetric)


class Columns:
    """The plugin over its tables."""

    def __init__(self, configuration: SchedulerConfiguration, now: float) -> None:
        self.tables, self.shapes = Tables(), Shapes()
        plugins = make_plugins(configuration, self.tables)
        (self.load,) = plugins.loads
        self.load.advance(now)
        self.plugin = next(
            each
            for each in plugins.profiles["koord-scheduler"].filters
            if isinstance(each, LoadAwareScheduling)
        )

    def node(self, node: SchedulingNode, metric: NodeMetric | None) -> None:
        row = self.tables.upsert_node(node)
        self.load.set_report(row, metric)

    def place(self, uid: str, on: str, each: OraclePod) -> None:
        if each.reserves:
            self.tables.reservations.upsert(make_facts(uid.removeprefix("uid-")))
        pod = each.pod
        self.tables.place(
            Booking(
                key=f"default/{pod.metadata.name}",
                uid=uid,
                shape=self.shapes.of(pod),
                node=on,
                allocation=Allocation(reservation=each.uses),
                start=each.start,
                initialized=each.initialized,
            )
        )

    def remove(self, uid: str) -> None:
        self.tables.remove(uid)
        self.tables.reservations.delete(uid)

    def answers(self, pod: SchedulingPod) -> dict[str, tuple[list[str], int]]:
        """Return the reasons and the score by node, after one row and all rows agreed."""
        shape = self.tables.reduction.of(self.shapes.of(pod))
        texts = [reason.text for reason in self.plugin.reasons(shape)]
        every = slice(0, len(self.tables.nodes))
        masks = self.plugin.filter(shape, self.tables, every).tolist()
        scores = self.plugin.score(shape, self.tables, every).tolist()
        found = {}
        for name in _NODES:
            row = self.tables.nodes.row(name)
            if row is not None:
                assert masks[row] == self.plugin.filter_row(shape, self.tables, row)
                assert scores[row] == self.plugin.score_row(shape, self.tables, row)
                reasons = [text for bit, text in enumerate(texts) if masks[row] >> bit & 1]
                found[name] = sorted(reasons), scores[row]
        return found


def _some(random: Random, odds: float, value: Any) -> Any:
    return value if random.random() < odds else {}


def _arguments(random: Random) -> Tree:
    def percents() -> dict[str, int]:
        return random.choice(
            ({}, {"cpu": 40}, {"cpu": 65, "memory": 30}, {"cpu": 0}, {"test.io/part": 50})
        )

    found: Tree = {
        "usageThresholds": percents(),
        "prodUsageThresholds": percents(),
        "filterExpiredNodeMetrics": random.random() < 0.7,
        "enableScheduleWhenNodeMetricsExpired": random.random() < 0.3,
        "nodeMetricExpirationSeconds": random.choice((180, 300)),
        "dominantResourceWeight": random.choice((0, 0, 3)),
        "resourceWeights": random.choice(({}, {"cpu": 2, "memory": 1}, {"memory": 5})),
        "estimatedScalingFactors": random.choice(({}, {"cpu": 33}, {"test.io/part": 50})),
        "prodUsageIncludeSys": random.random() < 0.5,
        "scoreAccordingProdUsage": random.random() < 0.5,
        "estimatedSecondsAfterPodScheduled": random.choice((0, 0, 120)),
        "estimatedSecondsAfterInitialized": random.choice((0, 0, 90)),
        "allowCustomizeEstimation": random.random() < 0.6,
        "supportedResources": random.choice(([], ["test.io/part"])),
    }
    if random.random() < 0.5:
        found["aggregated"] = {
            "usageThresholds": percents(),
            "usageAggregationType": random.choice(("", "p95", "avg")),
            "usageAggregatedDuration": random.choice(("0s", "5m", "10m0s")),
            "scoreAggregationType": random.choice(("", "p95")),
            "scoreAggregatedDuration": random.choice(("0s", "5m")),
        }
    return found


def _node(random: Random, name: str) -> SchedulingNode:
    amounts = {
        "cpu": random.choice(("0", "32", "32", "24500m")),
        "memory": random.choice(("64Gi", "100", "1Pi")),
    } | _some(random, 0.5, {"test.io/part": "10"})
    annotations = _some(random, 0.2, {"node.koordinator.sh/raw-allocatable": '{"cpu":"16"}'})
    thresholds: Any = {
        "usageThresholds": random.choice(({}, {"cpu": 20, "memory": 90})),
        "prodUsageThresholds": random.choice(({}, {"cpu": 0}, {"cpu": 60})),
        "aggregatedUsage": random.choice(
            (
                None,
                {"usageThresholds": {"cpu": 50}},
                {"usageThresholds": {"cpu": 30}, "usageAggregationType": "p95"},
                {
                    "usageThresholds": {"memory": 30},
                    "usageAggregationType": "avg",
                    "usageAggregatedDuration": "5m",
                },
            )
        ),
    }
    key = "scheduling.koordinator.sh/usage-thresholds"
    text = random.choice((json.dumps(thresholds), json.dumps(thresholds), "{", ""))
    annotations = annotations | _some(random, 0.5, {key: text})
    return make_node(name, allocatable=amounts, annotations=annotations)


def _usage(random: Random) -> Tree:
    cpu = random.choice(("0", "1", "7500m", "11", "18", "-5", "900P"))
    memory = random.choice(("0", "9Gi", "40Gi", "-1", "8E"))
    return {"resources": _some(random, 0.9, {"cpu": cpu, "memory": memory, "test.io/part": "4"})}


def _metric(random: Random, now: int) -> NodeMetric | None:
    if random.random() < 0.15:
        return None
    status: Tree = {}
    if random.random() < 0.9:
        moment = now - random.choice((0, 0, 1, 30, 59, 60, 61, 120, 179, 180, 400))
        status["updateTime"] = format_time(datetime.fromtimestamp(moment, UTC))
    if random.random() < 0.85:
        windows = [
            {"duration": text, "usage": {kind: _usage(random) for kind in ("avg", "p95", "p50")}}
            for text in random.sample(("5m0s", "10m0s"), random.randint(0, 2))
        ]
        status["nodeMetric"] = {
            "nodeUsage": _usage(random),
            "systemUsage": _usage(random),
            "aggregatedNodeUsages": windows,
        }
    status["podsMetric"] = [
        {
            "namespace": "default",
            "name": name,
            "podUsage": _usage(random),
            "priority": random.choice(("koord-prod", "koord-prod", "koord-batch", "")),
        }
        for name in _NAMES
        if random.random() < 0.6
    ]
    interval = random.choice((None, 0, 30, 60, 120))
    spec = {"metricCollectPolicy": {"reportIntervalSeconds": interval}} if interval else {}
    return _decode(msgspec.json.encode({"metadata": {}, "spec": spec, "status": status}))


def _pod(random: Random, name: str, **more: str) -> SchedulingPod:
    amounts = {
        "cpu": random.choice(("1", "3", "6500m")),
        "memory": random.choice(("0", "3Gi", "8E")),
        "test.io/part": "2",
        "kubernetes.io/batch-cpu": "4001",
        "kubernetes.io/mid-memory": "7Gi",
    }
    annotations = {
        f"{_ESTIMATED}-scaling-factors": random.choice(('{"cpu":50}', '{"memory":120}')),
        f"{_ESTIMATED}-seconds-after-pod-scheduled": random.choice(("0", "150")),
        f"{_ESTIMATED}-seconds-after-initialized": random.choice(("0", "70")),
    }
    return make_pod(
        name,
        requests={key: text for key, text in amounts.items() if random.random() < 0.7},
        limits={key: text for key, text in amounts.items() if random.random() < 0.3},
        labels={"app": random.choice("ab"), **random.choice(({}, {}, _IGNORES))},
        annotations={k: v for k, v in annotations.items() if random.random() < 0.3} | more,
        priority=random.choice((9500, 9500, 7500, 5500, 3500)),
    )


class Cluster:
    """A changing cluster in the oracle's form, and in columns that follow each change."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = _NOW
        self.arguments = _arguments(random)
        profile = chart_profile()
        profile["pluginConfig"] = [args("LoadAwareScheduling", **self.arguments)]
        text = json.dumps(file(profiles=[profile]))
        self.configuration = read_configuration(text, obj="test")
        self.columns = Columns(self.configuration, self.now)
        self.nodes: dict[str, OracleNode] = {}
        self.set_node("n0")

    def step(self) -> None:
        random = self.random
        change = random.choice(
            (self.place, self.place, self.place, self.remove, self.report, self.report, self.wait)
        )
        if random.random() < 0.2:
            change = random.choice((self.change_node, self.delete_node))
        change()

    def set_node(self, name: str) -> None:
        node = _node(self.random, name)
        known = self.nodes.setdefault(name, OracleNode(node))
        known.node = node
        self.columns.tables.upsert_node(node)

    def change_node(self) -> None:
        self.set_node(self.random.choice(_NODES))

    def delete_node(self) -> None:
        if not self.nodes:
            return
        name = self.random.choice(sorted(self.nodes))
        for uid in self.nodes.pop(name).pods:
            self.columns.remove(uid)
        self.columns.tables.delete_node(name)

    def report(self) -> None:
        if self.nodes:
            name = self.random.choice(sorted(self.nodes))
            self.nodes[name].metric = metric = _metric(self.random, self.now)
            row = self.columns.tables.nodes.row(name)
            assert row is not None
            self.columns.load.set_report(row, metric)

    def wait(self) -> None:
        self.now += self.random.choice((1, 60, 120))
        self.columns.load.advance(self.now)

    def place(self) -> None:
        if not self.nodes:
            return
        random = self.random
        on = random.choice(sorted(self.nodes))
        reserves = random.random() < 0.25
        name = random.choice(_RESERVATIONS if reserves else _NAMES)
        uid = f"uid-{name}"
        for node in self.nodes.values():
            node.pods.pop(uid, None)
        mark = {ANNOTATION_RESERVE_POD: "true"} if reserves else {}
        each = OraclePod(
            _pod(random, name, **mark),
            start=self.now - random.choice((0, 30, 61, 100, 500)),
            initialized=random.choice((0, 0, self.now - 40)),
            reserves=reserves,
        )
        if not reserves and random.random() < 0.4:
            each = replace(each, uses=f"uid-{random.choice(_RESERVATIONS)}")
        self.nodes[on].pods[uid] = each
        self.columns.place(uid, on, each)

    def remove(self) -> None:
        uids = sorted(uid for node in self.nodes.values() for uid in node.pods)
        if uids:
            uid = self.random.choice(uids)
            for node in self.nodes.values():
                node.pods.pop(uid, None)
            self.columns.remove(uid)

    def from_scratch(self) -> Columns:
        """Return columns that see the present state alone, the pods before their nodes."""
        columns = Columns(self.configuration, self.now)
        for name, on in self.nodes.items():
            for uid, each in on.pods.items():
                columns.place(uid, name, each)
        for on in self.nodes.values():
            columns.node(on.node, on.metric)
        return columns


def _owned(pod: SchedulingPod) -> SchedulingPod:
    """Return the pod as one of a DaemonSet."""
    owner = {"kind": "DaemonSet", "name": "d", "uid": "1", "controller": True, "apiVersion": "v1"}
    tree = msgspec.to_builtins(pod.metadata) | {"ownerReferences": [owner]}
    metadata = msgspec.convert(tree, type(pod.metadata))
    return msgspec.structs.replace(pod, metadata=metadata)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_the_columns_decide_as_the_oracle_at_every_step(seed: int) -> None:
    random = Random(seed)
    cluster = Cluster(random)
    asked = [_pod(random, f"q{number}") for number in range(3)]
    asked.append(_owned(_pod(random, "daemon")))
    for _ in range(12):
        cluster.step()
        oracle = Oracle(cluster.arguments, cluster.now)
        scratch = cluster.from_scratch()
        for pod in asked:
            expected = {
                name: (oracle.reasons(pod, on), oracle.score(pod, on))
                for name, on in sorted(cluster.nodes.items())
            }
            assert cluster.columns.answers(pod) == expected
            assert scratch.answers(pod) == expected


def test_random_clusters_have_every_kind_of_verdict() -> None:
    seen = set()
    for seed in range(25):
        random = Random(seed)
        cluster = Cluster(random)
        for _ in range(12):
            cluster.step()
            oracle = Oracle(cluster.arguments, cluster.now)
            for on in cluster.nodes.values():
                pod = _pod(random, "q")
                seen.add("scored high" if oracle.score(pod, on) > 50 else "scored low")
                seen.update(oracle.reasons(pod, on) or ["passes"])
    assert seen >= {
        "passes",
        "scored high",
        "scored low",
        "node(s) nodeMetric expired",
        "node(s) cpu usage exceed threshold",
        "node(s) cpu aggregated usage exceed threshold",
        "node(s) memory usage exceed threshold",
    }
