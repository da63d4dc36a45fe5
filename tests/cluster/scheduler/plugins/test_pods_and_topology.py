"""Spread and affinity between pods on random clusters equal a slow oracle's verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.plugins.between_pods.pod_affinity import (
    InterPodAffinity,
    InterPodAffinityScore,
)
from cluster.scheduler.plugins.between_pods.topology_spread import (
    PodTopologySpread,
    PodTopologySpreadScore,
)
from cluster.scheduler.plugins.contract import NO_LIMIT
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.between_pods_oracle import BetweenPods
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.oracle import OracleNode

_NAMESPACES = {"default": {"team": "a"}, "other": {"team": "b"}, "third": {"team": "b"}}
_LABELS = st.fixed_dictionaries(
    {"app": st.sampled_from(["web", "db"])}, optional={"v": st.just("1")}
)
_SELECTOR: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"matchLabels": {"app": "web"}},
        {"matchLabels": {"app": "db"}},
        {"matchExpressions": [{"key": "v", "operator": "DoesNotExist"}]},
    ]
)
_KEY = st.sampled_from(["zone", "kubernetes.io/hostname"])
_TERM = st.fixed_dictionaries(
    {"topologyKey": _KEY, "labelSelector": _SELECTOR},
    optional={
        "namespaces": st.just(["other"]),
        "namespaceSelector": st.sampled_from([{}, {"matchLabels": {"team": "b"}}]),
    },
)
_TERMS = st.fixed_dictionaries(
    {},
    optional={
        "requiredDuringSchedulingIgnoredDuringExecution": st.lists(_TERM, max_size=2),
        "preferredDuringSchedulingIgnoredDuringExecution": st.lists(
            st.fixed_dictionaries({"weight": st.integers(1, 100), "podAffinityTerm": _TERM}),
            max_size=2,
        ),
    },
)
_SPREAD = st.fixed_dictionaries(
    {
        "maxSkew": st.integers(1, 2),
        "topologyKey": _KEY,
        "whenUnsatisfiable": st.sampled_from(["DoNotSchedule", "ScheduleAnyway"]),
        "labelSelector": _SELECTOR,
    },
    optional={
        "minDomains": st.integers(1, 4),
        "nodeAffinityPolicy": st.sampled_from(["Honor", "Ignore"]),
        "nodeTaintsPolicy": st.sampled_from(["Honor", "Ignore"]),
        "matchLabelKeys": st.just(["v"]),
    },
)
_POD = st.fixed_dictionaries(
    {
        "labels": _LABELS,
        "namespace": st.sampled_from(list(_NAMESPACES)),
        "affinity": st.fixed_dictionaries(
            {}, optional={"podAffinity": _TERMS, "podAntiAffinity": _TERMS}
        ),
        "topologySpreadConstraints": st.lists(_SPREAD, max_size=2),
    },
    optional={"nodeSelector": st.just({"disk": "ssd"})},
)
_NODE = st.fixed_dictionaries(
    {
        "labels": st.fixed_dictionaries(
            {}, optional={"zone": st.sampled_from(["a", "b", "c"]), "disk": st.just("ssd")}
        ),
        "taints": st.sampled_from([[], [{"key": "t", "effect": "NoSchedule"}]]),
    }
)
_RUNNING = st.lists(st.tuples(st.integers(0, 5), _POD, st.booleans()), max_size=8)


class _Cluster(BetweenPods):
    def __init__(
        self, nodes: list[dict[str, Any]], running: list[tuple[int, dict[str, Any], bool]]
    ) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        made = [OracleNode(make_node(f"n{i}", **node)) for i, node in enumerate(nodes)]
        super().__init__(made, _NAMESPACES)
        for name, labels in _NAMESPACES.items():
            self.tables.namespaces.set(name, labels)
        for on in self.nodes:
            self.tables.upsert_node(on.node)
        for number, (where, spec, terminating) in enumerate(running):
            on = self.nodes[where % len(self.nodes)]
            pod = make_pod(f"r{number}", node=on.node.metadata.name, **spec)
            on.pods.append(pod)
            if terminating:
                self.terminating.add(pod.metadata.uid)
            self.tables.place(
                Booking(
                    key="",
                    uid=pod.metadata.uid,
                    shape=self.shapes.of(pod),
                    node=on.node.metadata.name,
                    terminating=terminating,
                )
            )


@settings(max_examples=120, deadline=None)
@given(st.lists(_NODE, min_size=1, max_size=6), _RUNNING, _POD, st.data())
def test_spread_and_affinity_equal_the_oracle(
    nodes: list[dict[str, Any]],
    running: list[tuple[int, dict[str, Any], bool]],
    spec: dict[str, Any],
    data: st.DataObject,
) -> None:
    cluster = _Cluster(nodes, running)
    pod = make_pod("p", **spec)
    shape = cluster.shapes.of(pod)
    every = slice(0, len(nodes))
    affinity, spread = InterPodAffinity(), PodTopologySpread()
    for plugin, expected in (
        (affinity, cluster.affinity_reason),
        (spread, cluster.spread_reason),
    ):
        found = [""] * len(nodes)
        if plugin.applies(shape, cluster.tables):
            texts = [reason.text for reason in plugin.reasons(shape)]
            for row, mask in enumerate(plugin.filter(shape, cluster.tables, every).tolist()):
                assert mask.bit_count() <= 1
                found[row] = texts[mask.bit_length() - 1] if mask else ""
        assert found == [expected(pod, on) for on in cluster.nodes]
    rows = sorted(data.draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1)))
    feasible = np.array(rows, dtype=np.intp)
    chosen = [cluster.nodes[row] for row in rows]
    by_spread = PodTopologySpreadScore(spread)
    if by_spread.applies(shape, cluster.tables):
        scores = by_spread.score_set(shape, cluster.tables, feasible).tolist()
        assert scores == cluster.spread_scores(pod, chosen)
    sums = [cluster.affinity_sum(pod, on) for on in chosen]
    low, high = min(sums), max(sums)
    by_affinity = InterPodAffinityScore(affinity)
    if by_affinity.applies(shape, cluster.tables):
        scores = by_affinity.score_set(shape, cluster.tables, feasible).tolist()
        assert scores == [100 * (s - low) // (high - low) if high > low else 0 for s in sums]
    else:
        assert low == high


@settings(max_examples=30, deadline=None)
@given(
    st.lists(_NODE, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 7), _POD, st.integers(0, 5), st.booleans()), max_size=15),
)
def test_what_is_kept_follows_pods_that_come_and_go(
    nodes: list[dict[str, Any]], steps: list[tuple[int, dict[str, Any], int, bool]]
) -> None:
    cluster = _Cluster(nodes, [])
    affinity, spread = InterPodAffinity(), PodTopologySpread()
    profile = Profile(
        "s",
        filters=(NodeAffinity(), spread, affinity),
        set_scores=((PodTopologySpreadScore(spread), 2), (InterPodAffinityScore(affinity), 2)),
    )
    kept = Evaluator(profile, cluster.tables)
    for number, (name, spec, where, come) in enumerate(steps):
        shape = cluster.shapes.of(make_pod("p", **spec))
        found = kept.evaluate(shape)
        fresh_shape = Shapes().of(make_pod("p", **spec))
        fresh = Evaluator(profile, cluster.tables).evaluate(fresh_shape)
        assert found.feasible.tolist() == fresh.feasible.tolist()
        assert found.totals.tolist() == fresh.totals.tolist()
        if come:
            node = f"n{where % len(nodes)}"
            cluster.tables.place(Booking(key="", uid=str(name), shape=shape, node=node))
        else:
            cluster.tables.remove(str(name))
        if number % 4 == 3:
            row = where % len(nodes)
            cluster.tables.delete_node(f"n{row}")
            cluster.tables.upsert_node(make_node(f"n{row}", **nodes[(row + 1) % len(nodes)]))


def test_labels_that_a_pod_gets_later_change_no_term_with_label_keys() -> None:
    """As in kube-scheduler 1.36.3: what they mean was merged into the selector before."""
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"app": "a"}},
        "matchLabelKeys": ["version"],
    }
    rules = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    runs = make_pod("runs", labels={"version": "2"}, affinity={"podAntiAffinity": rules})
    tables.place(Booking(key="", uid="u", shape=shapes.of(runs), node="n"))
    pod = shapes.of(make_pod("p", labels={"app": "a", "version": "1"}))
    assert InterPodAffinity().filter(pod, tables, slice(0, 1)).all()


@pytest.mark.parametrize(
    ("ignore", "prefers", "scores"),
    [(False, False, [100, 0]), (True, False, None), (True, True, [100, 0])],
)
def test_terms_of_running_pods_may_be_left_out_for_pods_without_preferences(
    ignore: bool, prefers: bool, scores: list[int] | None
) -> None:
    """Required ones too, as kube-scheduler 1.36.3 scores with the argument
    ignorePreferredTermsOfExistingPods."""
    tables, shapes = Tables(), Shapes()
    for name in ("n0", "n1"):
        tables.upsert_node(make_node(name))
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "a"}}}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    runs = make_pod("runs", affinity={"podAffinity": required})
    tables.place(Booking(key="", uid="u", shape=shapes.of(runs), node="n0"))
    weighted = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {}}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    affinity = {"podAffinity": preferred} if prefers else {}
    pod = shapes.of(make_pod("p", labels={"app": "a"}, affinity=affinity))
    score = InterPodAffinityScore(InterPodAffinity(ignore_existing=ignore))
    assert score.applies(pod, tables) is (scores is not None)
    if scores is not None:
        assert score.score_set(pod, tables, np.arange(2, dtype=np.intp)).tolist() == scores


def test_a_term_that_pods_of_several_shapes_have_counts_once_for_each_pod() -> None:
    tables, shapes = Tables(), Shapes()
    for name in ("n0", "n1"):
        tables.upsert_node(make_node(name))

    def run(uid: str, node: str, weight: int, selector: dict[str, str]) -> None:
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector}}
        preferred = [{"weight": weight, "podAffinityTerm": term}]
        rules = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
        pod = make_pod(uid, labels={"own": uid}, affinity={"podAffinity": rules})
        tables.place(Booking(key="", uid=uid, shape=shapes.of(pod), node=node))

    run("u0", "n0", 10, {"app": "a"})
    run("u1", "n0", 10, {"app": "a"})
    run("u2", "n1", 30, {"tier": "b"})
    pod = shapes.of(make_pod("p", labels={"app": "a", "tier": "b"}))
    score = InterPodAffinityScore(InterPodAffinity())
    rows = np.arange(2, dtype=np.intp)
    assert score.score_set(pod, tables, rows).tolist() == [0, 100]
    run("u3", "n0", 11, {"app": "a"})
    assert score.score_set(pod, tables, rows).tolist() == [100, 0]


def _spread_cluster(in_a: int, in_b: int) -> tuple[Tables, Shapes]:
    """Return zone a with two nodes, zone b with one, and one without a zone; with pods of app w."""
    tables, shapes = Tables(), Shapes()
    for name, zone in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("x", "")):
        tables.upsert_node(make_node(name, labels={"zone": zone} if zone else {}))
    running = shapes.of(make_pod("u", labels={"app": "w"}))
    for node, count in (("a0", in_a), ("b0", in_b), ("x", 5)):
        for number in range(count):
            tables.place(Booking(key="", uid=f"{node}-{number}", shape=running, node=node))
    return tables, shapes


def _spreading(when: str, **more: Any) -> list[dict[str, Any]]:
    selector = {"matchLabels": {"app": "w"}}
    rule = {"topologyKey": "zone", "whenUnsatisfiable": when, "labelSelector": selector}
    return [{"maxSkew": 1, **rule, **more}]


@pytest.mark.parametrize(
    ("in_a", "in_b", "app", "pods", "more", "mask", "headroom"),
    [
        pytest.param(2, 1, "w", 0, {}, [1, 1, 0, 2], [0, 0, 1, 0], id="only where fewer are"),
        pytest.param(2, 1, "w", 3, {}, [1, 1, 0, 2], [2, 2, 3, 0], id="while others follow"),
        pytest.param(2, 1, "v", 0, {}, [0, 0, 0, 2], [None, None, None, 0], id="not counted"),
        pytest.param(4, 1, "v", 0, {}, [1, 1, 0, 2], [0, 0, None, 0], id="not counted, but held"),
        pytest.param(1, 1, "w", 0, {}, [0, 0, 0, 2], [1, 1, 1, 0], id="even"),
        pytest.param(2, 1, "w", 0, {"maxSkew": 2}, [0, 0, 0, 2], [1, 1, 2, 0], id="more skew"),
        pytest.param(0, 0, "w", 9, {"minDomains": 3}, [0, 0, 0, 2], [1, 1, 1, 0], id="few domains"),
        pytest.param(1, 1, "w", 9, {"minDomains": 3}, [1, 1, 1, 2], [0, 0, 0, 0], id="too few"),
        pytest.param(1, 1, "w", 0, {"minDomains": 2}, [0, 0, 0, 2], [1, 1, 1, 0], id="enough"),
    ],
)
def test_how_far_zones_may_differ(
    in_a: int,
    in_b: int,
    app: str,
    pods: int,
    more: dict[str, Any],
    mask: list[int],
    headroom: list[int | None],
) -> None:
    """None: as many as there are. A node without a zone takes none."""
    tables, shapes = _spread_cluster(in_a, in_b)
    rules = _spreading("DoNotSchedule", **more)
    pod = shapes.of(make_pod("p", labels={"app": app}, topologySpreadConstraints=rules))
    plugin, every = PodTopologySpread(), slice(0, 4)
    assert plugin.filter(pod, tables, every).tolist() == mask
    expected = [NO_LIMIT if count is None else count for count in headroom]
    assert plugin.headroom(pod, tables, every, pods).tolist() == expected
    assert not PodTopologySpreadScore(plugin).applies(pod, tables)


@pytest.mark.parametrize(
    ("in_a", "in_b", "more", "scores"),
    [
        # ln 4 for each pod of a zone, rounded: 3 and 1; then 2 more for the skew: 5 and 3.
        (2, 1, {}, [33, 33, 100, 0]),
        (2, 1, {"maxSkew": 3}, [60, 60, 100, 0]),
        (0, 0, {}, [100, 100, 100, 0]),
        (0, 4, {}, [100, 100, 0, 0]),
        (2, 1, {"topologyKey": "rack"}, [0, 0, 0, 0]),
    ],
)
def test_zones_with_fewer_pods_come_first(
    in_a: int, in_b: int, more: dict[str, Any], scores: list[int]
) -> None:
    tables, shapes = _spread_cluster(in_a, in_b)
    rules = _spreading("ScheduleAnyway", **more)
    pod = shapes.of(make_pod("p", labels={"app": "w"}, topologySpreadConstraints=rules))
    spread = PodTopologySpread()
    score = PodTopologySpreadScore(spread)
    assert score.applies(pod, tables)
    assert not spread.applies(pod, tables)
    assert score.score_set(pod, tables, np.arange(4, dtype=np.intp)).tolist() == scores
    # Among nodes that could take the pod; a single zone has no better one.
    alone = score.score_set(pod, tables, np.array([2, 3], dtype=np.intp)).tolist()
    assert alone == ([100, 0] if any(scores) else [0, 0])
