"""Spread and affinity between pods on random clusters equal a slow oracle's verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.meta import LabelSelector, matches
from apis.scheduling_pod import PodAffinity, PodAffinityTerm, SchedulingPod
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.plugins.between_pods.pod_affinity import (
    InterPodAffinity,
    InterPodAffinityScore,
)
from cluster.scheduler.plugins.between_pods.topology_spread import (
    PodTopologySpread,
    PodTopologySpreadScore,
)
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler import oracle
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


class _Cluster:
    def __init__(
        self, nodes: list[dict[str, Any]], running: list[tuple[int, dict[str, Any], bool]]
    ) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        self.nodes = [OracleNode(make_node(f"n{i}", **node)) for i, node in enumerate(nodes)]
        self.terminating: set[str] = set()
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

    def domain(self, on: OracleNode, key: str) -> str | None:
        return on.node.metadata.labels.get(key)

    def within(self, on: OracleNode, key: str) -> list[SchedulingPod]:
        """Return the pods in the domain of a node, none if it lacks the key."""
        value = self.domain(on, key)
        if value is None:
            return []
        return [
            pod for other in self.nodes if self.domain(other, key) == value for pod in other.pods
        ]

    # --- affinity ------------------------------------------------------------------------------

    def meant(self, owner: SchedulingPod, term: PodAffinityTerm, pod: SchedulingPod) -> bool:
        namespaces = set(term.namespaces)
        if term.namespace_selector is not None:
            namespaces |= {
                n for n, ls in _NAMESPACES.items() if matches(term.namespace_selector, ls)
            }
        elif not namespaces:
            namespaces = {owner.metadata.namespace}
        if pod.metadata.namespace not in namespaces:
            return False
        return matches(term.label_selector, pod.metadata.labels)

    def affinity_reason(self, pod: SchedulingPod, on: OracleNode) -> str:
        affinity = pod.spec.affinity
        beside = (affinity.pod_affinity if affinity else None) or PodAffinity()
        apart = (affinity.pod_anti_affinity if affinity else None) or PodAffinity()

        def all_mean(other: SchedulingPod) -> bool:
            return all(self.meant(pod, term, other) for term in beside.required)

        if beside.required:
            keys = [term.topology_key for term in beside.required]
            if any(self.domain(on, key) is None for key in keys):
                return "node(s) didn't match pod affinity rules"
            if not all(any(map(all_mean, self.within(on, key))) for key in keys):
                exists = any(
                    all_mean(other) and self.domain(where, key) is not None
                    for where in self.nodes
                    for other in where.pods
                    for key in keys
                )
                if exists or not all_mean(pod):
                    return "node(s) didn't match pod affinity rules"
        for term in apart.required:
            if any(self.meant(pod, term, other) for other in self.within(on, term.topology_key)):
                return "node(s) didn't match pod anti-affinity rules"
        for where in self.nodes:
            for other in where.pods:
                theirs = other.spec.affinity.pod_anti_affinity if other.spec.affinity else None
                for term in theirs.required if theirs else ():
                    value = self.domain(where, term.topology_key)
                    same = value is not None and value == self.domain(on, term.topology_key)
                    if same and self.meant(other, term, pod):
                        return "node(s) didn't satisfy existing pods anti-affinity rules"
        return ""

    def affinity_sum(self, pod: SchedulingPod, on: OracleNode) -> int:
        total = 0
        own = pod.spec.affinity
        for sign, terms in (
            (1, own.pod_affinity if own else None),
            (-1, own.pod_anti_affinity if own else None),
        ):
            for weighted in terms.preferred if terms else ():
                term = weighted.pod_affinity_term
                for other in self.within(on, term.topology_key):
                    total += sign * weighted.weight * self.meant(pod, term, other)
        for where in self.nodes:
            for other in where.pods:
                theirs = other.spec.affinity
                weighted_terms = []
                if theirs and theirs.pod_affinity:
                    weighted_terms += [(1, term) for term in theirs.pod_affinity.required]
                    weighted_terms += [
                        (p.weight, p.pod_affinity_term) for p in theirs.pod_affinity.preferred
                    ]
                if theirs and theirs.pod_anti_affinity:
                    weighted_terms += [
                        (-p.weight, p.pod_affinity_term) for p in theirs.pod_anti_affinity.preferred
                    ]
                for weight, term in weighted_terms:
                    value = self.domain(where, term.topology_key)
                    if value is not None and value == self.domain(on, term.topology_key):
                        total += weight * self.meant(other, term, pod)
        return total

    # --- spread --------------------------------------------------------------------------------

    def _counted(self, pod: SchedulingPod, constraint: Any) -> Callable[[OracleNode], int]:
        selector: LabelSelector = constraint.label_selector
        own = {
            k: pod.metadata.labels[k]
            for k in constraint.match_label_keys
            if k in pod.metadata.labels
        }

        def count(on: OracleNode) -> int:
            return sum(
                other.metadata.namespace == pod.metadata.namespace
                and other.metadata.uid not in self.terminating
                and matches(selector, other.metadata.labels)
                and all(other.metadata.labels.get(k) == v for k, v in own.items())
                for other in on.pods
            )

        return count

    def _eligible(self, pod: SchedulingPod, constraint: Any, when: str) -> list[OracleNode]:
        keys = [
            c.topology_key
            for c in pod.spec.topology_spread_constraints
            if c.when_unsatisfiable == when
        ]
        return [
            on
            for on in self.nodes
            if all(self.domain(on, key) is not None for key in keys)
            and (constraint.node_affinity_policy == "Ignore" or not oracle.affinity(pod, on))
            and (constraint.node_taints_policy == "Ignore" or not oracle.taints(pod, on))
        ]

    def spread_reason(self, pod: SchedulingPod, on: OracleNode) -> str:
        text = "node(s) didn't match pod topology spread constraints"
        for constraint in pod.spec.topology_spread_constraints:
            if constraint.when_unsatisfiable != "DoNotSchedule":
                continue
            value = self.domain(on, constraint.topology_key)
            if value is None:
                return f"{text} (missing required label)"
            count = self._counted(pod, constraint)
            by_domain: dict[str, int] = {}
            for other in self._eligible(pod, constraint, "DoNotSchedule"):
                key = self.domain(other, constraint.topology_key) or ""
                by_domain[key] = by_domain.get(key, 0) + count(other)
            least = min(by_domain.values(), default=0)
            if constraint.min_domains is not None and len(by_domain) < constraint.min_domains:
                least = 0
            alone = OracleNode(on.node, [pod])
            if by_domain.get(value, 0) + count(alone) - least > constraint.max_skew:
                return text
        return ""

    def spread_scores(self, pod: SchedulingPod, feasible: list[OracleNode]) -> list[int]:
        constraints = [
            c
            for c in pod.spec.topology_spread_constraints
            if c.when_unsatisfiable == "ScheduleAnyway"
        ]
        scored = [
            on
            for on in feasible
            if all(self.domain(on, c.topology_key) is not None for c in constraints)
        ]
        raw: dict[str, int] = {}
        for on in scored:
            total = 0.0
            for constraint in constraints:
                key = constraint.topology_key
                count = self._counted(pod, constraint)
                if key == "kubernetes.io/hostname":
                    size, pods = len(scored), count(on)
                else:
                    size = len({self.domain(other, key) for other in scored})
                    pods = sum(
                        count(other)
                        for other in self._eligible(pod, constraint, "ScheduleAnyway")
                        if self.domain(other, key) == self.domain(on, key)
                    )
                total += pods * math.log(size + 2) + constraint.max_skew - 1
            raw[on.node.metadata.name] = math.floor(total + 0.5)
        result = []
        for on in feasible:
            score = raw.get(on.node.metadata.name)
            if score is None:
                result.append(0)
            elif max(raw.values()) == 0:
                result.append(100)
            else:
                largest = max(raw.values())
                result.append(100 * (largest + min(raw.values()) - score) // largest)
        return result


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
