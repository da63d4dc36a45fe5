"""Verdicts on nodes with nominated pods: always those of a fresh look, and not worked out again for
nodes that are as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from cluster.scheduler.cycle import promised
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.trial import RowChecks
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.plugins.contract import Mask
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.preemption.making import PROFILE, Bed
from tests.cluster.scheduler.preemption.oracle import OracleNode, OraclePod, fits


def _held(bed: Bed, checks: RowChecks, pod: OraclePod) -> list[str]:
    """Return the names of the nodes that take a pod alone, and not beside nominated pods."""
    pending = bed.pending(pod)
    feasible = bed.evaluator.evaluate(pending.shape).feasible
    held = checks.held_by_nominated(pending, feasible)
    return sorted(bed.tables.nodes.name(row) for row in held)


def _expected(nodes: Iterable[OracleNode], pod: OraclePod) -> list[str]:
    held = []
    for node in nodes:
        others = tuple(each for each in node.promised if each.name != pod.name)
        alone, beside = replace(node, promised=()), replace(node, promised=others)
        if fits(pod, alone, node.pods) and not fits(pod, beside, node.pods):
            held.append(node.name)
    return sorted(held)


@pytest.mark.parametrize("seed", range(12))
def test_verdicts_follow_pods_nominations_and_nodes(seed: int) -> None:
    random = Random(seed)
    nodes = {f"n{n}": OracleNode(f"n{n}", 4000, 5) for n in range(5)}
    bed = Bed(list(nodes.values()))
    checks = RowChecks(PROFILE, bed.tables, bed.nominator)
    asked = [
        OraclePod(f"asked-{number}", priority, cpu, port=port)
        for number, (priority, cpu, port) in enumerate(
            ((0, 500, 0), (5, 1500, 0), (5, 1500, 1), (9, 3000, 0))
        )
    ]
    held = 0
    for step in range(150):
        node = nodes[random.choice(list(nodes))]
        pod = OraclePod(
            f"p{step}",
            random.choice((0, 5, 9)),
            random.choice((300, 1200, 2500)),
            port=random.choice((0, 0, 1)),
        )
        match random.randrange(5):
            case 0 if fits(pod, replace(node, promised=()), node.pods):
                nodes[node.name] = replace(node, pods=(*node.pods, pod))
                bed.tables.place(bed.booking(pod, node.name))
            case 1 if node.pods:
                gone, *others = random.sample(node.pods, len(node.pods))
                nodes[node.name] = replace(node, pods=tuple(others))
                bed.tables.remove(gone.name)
            case 2:
                # One of the pods that are asked about may be nominated itself.
                pod = random.choice((pod, *asked))
                for each in nodes.values():
                    kept = tuple(other for other in each.promised if other.name != pod.name)
                    nodes[each.name] = replace(each, promised=kept)
                promised = (*nodes[node.name].promised, pod)
                nodes[node.name] = replace(nodes[node.name], promised=promised)
                bed.nominator.nominate(bed.pending(pod), node.name)
            case 3 if node.promised:
                nodes[node.name] = replace(node, promised=node.promised[1:])
                bed.nominator.withdraw(node.promised[0].name)
            case 4:
                cpu = random.choice((2000, 4000, 6000))
                nodes[node.name] = replace(node, cpu=cpu)
                if random.random() < 0.3:
                    bed.tables.delete_node(node.name)
                amounts = {"cpu": f"{cpu}m", "pods": str(node.most_pods)}
                bed.tables.upsert_node(make_node(node.name, allocatable=amounts))
        for wanted in asked:
            expected = _expected(nodes.values(), wanted)
            assert _held(bed, checks, wanted) == expected
            held += len(expected)
    assert held


_looked_at: Counter[int] = Counter()


@dataclass(frozen=True, slots=True)
class _CountingFit(NodeResourcesFit):
    """Counts how often each row is looked at."""

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        _looked_at.update(np.arange(len(tables.nodes))[rows].tolist())
        return NodeResourcesFit.filter(self, pod, tables, rows)

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        _looked_at.update((row,))
        return NodeResourcesFit.filter_row(self, pod, tables, row)


def test_nodes_that_are_as_they_were_are_not_tried_again() -> None:
    nodes = [
        OracleNode(f"n{n}", 4000, 5, promised=(OraclePod(f"promised-{n}", 5, 3000),))
        for n in range(20)
    ]
    bed = Bed(nodes)
    checks = RowChecks(Profile("koord-scheduler", (), (_CountingFit(),)), bed.tables, bed.nominator)
    small, large = OraclePod("small", 0, 500), OraclePod("large", 0, 2000)
    every = sorted(node.name for node in nodes)

    def tried(pod: OraclePod, held: list[str]) -> set[str]:
        _looked_at.clear()
        assert _held(bed, checks, pod) == held
        return {bed.tables.nodes.name(row) for row in _looked_at}

    assert tried(small, []) == set(every)
    assert tried(large, every) == set(every)
    # The trials for the one kind are no changes for the other.
    assert tried(small, []) == tried(large, every) == set()
    bed.tables.place(bed.booking(OraclePod("more", 0, 900), "n7"))
    bed.nominator.withdraw("promised-3")
    others = [name for name in every if name != "n3"]
    assert tried(small, ["n7"]) == {"n7"}
    assert tried(large, others) == {"n7"}


def test_verdicts_for_the_kinds_asked_about_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promised, "_MOST_KEPT", 2)
    bed = Bed([OracleNode("n0", 4000, 5, promised=(OraclePod("promised", 5, 3000),))])
    checks = RowChecks(Profile("koord-scheduler", (), (_CountingFit(),)), bed.tables, bed.nominator)

    def is_tried(cpu: int) -> bool:
        _looked_at.clear()
        assert _held(bed, checks, OraclePod("asked", 0, cpu)) == []
        return bool(_looked_at)

    assert [is_tried(cpu) for cpu in (100, 200, 100, 300)] == [True, True, False, True]
    assert [is_tried(cpu) for cpu in (300, 100)] == [False, False]
    assert is_tried(200)


def test_a_spread_pod_meets_the_nominated_pods_of_one_node_at_a_time() -> None:
    """With those of all nodes at once, the nodes would have equally many again."""
    nodes = [
        OracleNode(name, 4000, 5, promised=(OraclePod(f"on-{name}", 5, 100, app="a"),))
        for name in ("n0", "n1")
    ]
    spread = PodTopologySpread()
    bed = Bed(nodes, profile=Profile("koord-scheduler", (), (spread,)))
    checks = RowChecks(bed.evaluator.profile, bed.tables, bed.nominator)
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "a"}},
    }
    shape = bed.shapes.of(
        make_pod("new", labels={"app": "a"}, topologySpreadConstraints=[constraint])
    )
    pending = PendingPod("default/new", "new", 0, shape, 0.0)
    feasible = bed.evaluator.evaluate(shape).feasible
    assert sorted(checks.held_by_nominated(pending, feasible)) == feasible.tolist() == [0, 1]
    # A pod of the kind on one of them makes it even for the other's nominated pod.
    bed.tables.place(bed.booking(OraclePod("more", 0, 100, app="a"), "n0"))
    feasible = bed.evaluator.evaluate(shape).feasible
    assert feasible.tolist() == [1]
    assert not checks.held_by_nominated(pending, feasible)
