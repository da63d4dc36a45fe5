"""What spread and affinity between pods decide, pod by pod and node by node, as slow plain code.

Written from docs/facts/scheduler.md, "Pod topology spread" and "Affinity between pods"; it sees
objects only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from apis.meta import LabelSelector, matches
from apis.scheduling_pod import PodAffinity, PodAffinityTerm, SchedulingPod
from tests.cluster.scheduler import oracle
from tests.cluster.scheduler.oracle import OracleNode


class BetweenPods:
    """namespaces: name -> labels. terminating: UIDs of pods that are being deleted."""

    def __init__(
        self, nodes: Sequence[OracleNode], namespaces: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.nodes = nodes
        self.namespaces = namespaces
        self.terminating: set[str] = set()

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
                n for n, ls in self.namespaces.items() if matches(term.namespace_selector, ls)
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

    def counted(self, pod: SchedulingPod, constraint: Any) -> Callable[[OracleNode], int]:
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

    def eligible(self, pod: SchedulingPod, constraint: Any, when: str) -> list[OracleNode]:
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
            count = self.counted(pod, constraint)
            by_domain: dict[str, int] = {}
            for other in self.eligible(pod, constraint, "DoNotSchedule"):
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
                count = self.counted(pod, constraint)
                if key == "kubernetes.io/hostname":
                    size, pods = len(scored), count(on)
                else:
                    size = len({self.domain(other, key) for other in scored})
                    pods = sum(
                        count(other)
                        for other in self.eligible(pod, constraint, "ScheduleAnyway")
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
