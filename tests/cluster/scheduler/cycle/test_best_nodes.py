"""Each placement has the best sum of the oracles' scores, over lives of pods that come and go.

The profile is that of upstream's chart without DeviceShare, whose oracle is one of allocations.
There are no Reservations, so that plugin decides nothing.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.core import pod_requests
from apis.decode import decode_object
from apis.keys import (
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_SCHEDULING_HINT,
    LABEL_NUMA_TOPOLOGY_POLICY,
    LABEL_QOS_CLASS,
)
from apis.meta import format_time
from apis.nodemetric import NodeMetric
from apis.scheduling_pod import (
    SchedulingPod,
    decode_scheduling_node,
    decode_scheduling_pod,
)
from cluster.scheduler.manifests import configuration
from kube.cache import Cache
from tests.cluster.scheduler import oracle, random_cluster
from tests.cluster.scheduler import resource_oracle as amounts
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.between_pods_oracle import BetweenPods
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.load import oracle as load
from tests.cluster.scheduler.numa import oracle as numa
from tests.cluster.scheduler.numa.making import topology_tree
from tests.cluster.scheduler.numa.random_nodes import BINDINGS, annotations_of
from tests.cluster.scheduler.oracle import OracleNode

Tree = dict[str, Any]

_LEFT_OUT = "DeviceShare"
_GI = 1 << 30


def _configuration() -> Tree:
    """Return the chart's configuration without the plugin whose oracle is missing here."""
    whole = configuration()
    (profile,) = whole["profiles"]
    for point in profile["plugins"].values():
        point["enabled"] = [each for each in point["enabled"] if each["name"] != _LEFT_OUT]
    profile["pluginConfig"] = [
        each for each in profile["pluginConfig"] if each["name"] != _LEFT_OUT
    ]
    return whole


_CONFIGURATION = _configuration()
_ARGUMENTS = {each["name"]: each["args"] for each in _CONFIGURATION["profiles"][0]["pluginConfig"]}
_FIT = {
    each["name"]: each["weight"]
    for each in _ARGUMENTS["NodeResourcesFit"]["scoringStrategy"]["resources"]
}
_RULES = numa.Rules()


class _Life:
    """A cluster as the scheduler sees it, and as the oracles have it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.bed = Bed(json.dumps(_CONFIGURATION))
        self.load = load.Oracle(_ARGUMENTS["LoadAwareScheduling"], self.bed.now)
        self.nodes: dict[str, OracleNode] = {}
        self.numa: dict[str, numa.Node] = {}
        self.loads: dict[str, load.OracleNode] = {}
        self.placed: dict[str, tuple[str, SchedulingPod, numa.Placed]] = {}
        self.between = BetweenPods([], {"default": {}})
        for tree in random_cluster.nodes(random, random.randint(2, 6)):
            self._add(tree)
        self.between.nodes = list(self.nodes.values())

    def _add(self, tree: Tree) -> None:
        random, name = self.random, tree["metadata"]["name"]
        policy = random.choice(["", "", "BestEffort", "Restricted", "SingleNUMANode"])
        if policy:
            tree["metadata"]["labels"][LABEL_NUMA_TOPOLOGY_POLICY] = policy
        ratio = random.choice([100, 100, 150])
        tree["metadata"]["annotations"] = {
            ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: json.dumps({"cpu": ratio / 100})
        }
        self.bed.show(self.bed.core.nodes, "ADDED", tree)
        self.nodes[name] = OracleNode(decode_scheduling_node(msgspec.json.encode(tree)))
        self.loads[name] = load.OracleNode(self.nodes[name].node, self._metric(name))
        allocatable = {each: amounts.capacity(self.nodes[name], each) for each in _FIT}
        machine, zones = None, {}
        if random.random() < 0.8:
            machine = Machine(1, 2, random.randint(1, 3), 2)
            zones = {
                number: {"cpu": 1000 * machine.cores_per_numa * 2, "memory": 6 * _GI}
                for number in range(2)
            }
            self._report(name, machine, zones)
        self.numa[name] = numa.Node(
            machine, (0, 1), zones, ratio=ratio, policy=policy, allocatable=allocatable
        )

    def _metric(self, name: str) -> NodeMetric | None:
        """Show the NodeMetric of some nodes."""
        if self.random.random() < 0.4:
            return None
        on = self.nodes[name]
        share = self.random.choice((0, 10, 40, 70))
        usage = {
            "cpu": f"{amounts.capacity(on, 'cpu') * share // 100}m",
            "memory": str(amounts.capacity(on, "memory") * share // 100),
        }
        tree: Tree = {
            "metadata": {"name": name},
            "status": {
                "updateTime": format_time(datetime.fromtimestamp(self.bed.now - 30, UTC)),
                "nodeMetric": {"nodeUsage": {"resources": usage}},
            },
        }
        self.bed.show(self._cache("NodeMetric"), "ADDED", tree)
        return decode_object(tree, NodeMetric, obj=name)

    def _cache(self, kind: str) -> Cache[Any]:
        return next(cache for cache in self.bed.core.caches if cache.resource.kind == kind)

    def _report(self, name: str, machine: Machine, zones: dict[int, dict[str, int]]) -> None:
        """Show the NodeResourceTopology of a node."""
        texts = {
            number: {"cpu": f"{zone['cpu']}m", "memory": str(zone["memory"])}
            for number, zone in zones.items()
        }
        tree = topology_tree(name, cpus=machine.cpus(), zones=texts)
        self.bed.show(self._cache("NodeResourceTopology"), "ADDED", tree)

    # --- pods ----------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Remove a pod, or let one come and compare what becomes of it."""
        if self.placed and self.random.random() < 0.25:
            name = self.random.choice(sorted(self.placed))
            node, pod, share = self.placed.pop(name)
            self.nodes[node].pods.remove(pod)
            self.numa[node].pods.remove(share)
            del self.loads[node].pods[name]
            self.bed.gone(name)
            self.bed.run()
            return
        name = f"p{number}"
        tree, wish = self._pod(name)
        pod = decode_scheduling_pod(msgspec.json.encode(tree))
        wish.amounts = {each: amounts.requested(pod, each) for each in pod_requests(pod)}
        best = self._best(pod, wish)
        self.bed.pods[name] = tree
        self.bed.show(self.bed.core.pods, "ADDED", tree)
        self.bed.run()
        node = self.bed.node_of(name)
        if not best:
            assert node == "", self._why(pod, wish)
            self.bed.gone(name)
            return
        assert node in best, (node, best, self._why(pod, wish))
        verdict = numa.decide(self.numa[node], wish, _RULES)
        allocation = self.bed.core.tables.bookings[pod.metadata.uid].allocation
        assert set(allocation.cpus) == verdict.cpus
        assert dict(allocation.numa) == verdict.numa
        share = numa.Placed(
            verdict.cpus, verdict.numa, wish.qos == "LSE", wish.cpu_exclusive, wish.amounts
        )
        self.nodes[node].pods.append(pod)
        self.numa[node].pods.append(share)
        self.loads[node].pods[name] = load.OraclePod(pod, start=self.bed.now)
        self.placed[name] = (node, pod, share)

    def _pod(self, name: str) -> tuple[Tree, numa.Wish]:
        random = self.random
        owners: dict[str, Tree] = {app: {} for app in random_cluster.APPS}
        tree = random_cluster.pod(random, name, owners=owners)
        metadata, spec = tree["metadata"], tree["spec"]
        # Workloads, pods of several containers, and requests of the pod itself, have tests of their
        # own.
        metadata.pop("ownerReferences", None)
        spec.pop("initContainers", None)
        spec.pop("resources", None)
        metadata |= {"namespace": "default", "uid": f"u-{name}", "annotations": {}}
        spec |= {"schedulerName": "koord-scheduler", "priority": 9500}
        spec["containers"] = spec["containers"][:1]
        wish = numa.Wish({}, qos="LS")
        if random.random() < 0.5:
            wish = self._bound(metadata, spec)
        if random.random() < 0.15:
            names = sorted(self.nodes)
            hint = {
                "nodeNames": random.sample(names, random.randint(0, len(names))),
                "preferredNodeNames": random.sample(names, random.randint(0, len(names))),
            }
            metadata["annotations"][ANNOTATION_SCHEDULING_HINT] = json.dumps(hint)
        return tree, wish

    def _bound(self, metadata: Tree, spec: Tree) -> numa.Wish:
        """Have a pod ask for CPUs of its own, at times with a NUMA policy."""
        random = self.random
        requests = {"cpu": str(random.randint(1, 4)), "memory": str(random.randint(0, 5) * _GI)}
        spec["containers"][0]["resources"] = {"requests": requests, "limits": requests}
        wish = numa.Wish(
            {},
            random.choice(list(BINDINGS)),
            random.choice(("LSE", "LSR")),
            random.choice(("", "", "BestEffort", "Restricted", "SingleNUMANode")),
            random.choice(("", "Preferred", "Required")),
            random.choice(("", "PCPULevel", "NUMANodeLevel")),
        )
        metadata["labels"][LABEL_QOS_CLASS] = wish.qos
        metadata["annotations"] |= annotations_of(wish)
        return wish

    # --- what the oracles say ------------------------------------------------------------------

    def _reasons(self, pod: SchedulingPod, wish: numa.Wish, name: str) -> list[str]:
        on = self.nodes[name]
        reasons = [
            reason
            for of in (
                oracle.unschedulable,
                oracle.taints,
                oracle.affinity,
                oracle.ports,
                oracle.fit,
            )
            for reason in of(pod, on)
        ]
        reasons += [self.between.spread_reason(pod, on), self.between.affinity_reason(pod, on)]
        reasons += numa.decide(self.numa[name], wish, _RULES).reasons
        reasons += self.load.reasons(pod, self.loads[name])
        return [reason for reason in reasons if reason]

    def _best(self, pod: SchedulingPod, wish: numa.Wish) -> list[str]:
        """Return the nodes with the highest sum, or the one that a hint prefers."""
        names = [name for name in self.nodes if not self._reasons(pod, wish, name)]
        hint = json.loads(pod.metadata.annotations.get(ANNOTATION_SCHEDULING_HINT, "{}"))
        if hint.get("nodeNames"):
            names = [name for name in names if name in hint["nodeNames"]]
        first = [name for name in hint.get("preferredNodeNames", ()) if name in names]
        if first or not names:
            return first[:1]
        totals = self._totals(pod, wish, names)
        return [name for name in names if totals[name] == max(totals.values())]

    def _totals(self, pod: SchedulingPod, wish: numa.Wish, names: list[str]) -> dict[str, int]:
        nodes = [self.nodes[name] for name in names]
        sums = [self.between.affinity_sum(pod, on) for on in nodes]
        low, high = min(sums), max(sums)
        parts: list[tuple[int, list[int]]] = [
            (3, amounts.fewest_first([amounts.taints_left(pod, on) for on in nodes])),
            (2, amounts.largest_first([oracle.preferred(pod, on) for on in nodes])),
            (1, [amounts.fit(pod, on, _FIT, amounts.least) for on in nodes]),
            (1, [amounts.balanced(pod, on, ("cpu", "memory")) for on in nodes]),
            (1, [oracle.image_locality(pod, on, list(self.nodes.values())) for on in nodes]),
            (1, [numa.decide(self.numa[name], wish, _RULES).score for name in names]),
            (1, [self.load.score(pod, self.loads[name]) for name in names]),
            (2, [100 * (each - low) // (high - low) if high > low else 0 for each in sums]),
        ]
        if pod.spec.topology_spread_constraints:
            parts.append((2, self.between.spread_scores(pod, nodes)))
        return {
            name: sum(weight * scores[place] for weight, scores in parts)
            for place, name in enumerate(names)
        }

    def _why(self, pod: SchedulingPod, wish: numa.Wish) -> dict[str, object]:
        """Return what each node says, for the message of a failed test."""
        reasons = {name: self._reasons(pod, wish, name) for name in self.nodes}
        passing = [name for name in self.nodes if not reasons[name]]
        ours = self.bed.core.why(f"default/{pod.metadata.name}")
        return {
            "reasons": reasons,
            "totals": self._totals(pod, wish, passing) if passing else {},
            "ours": ours,
        }


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_pod_goes_to_a_node_with_the_best_sum(seed: int) -> None:
    life = _Life(Random(seed))
    for number in range(14):
        life.step(number)
