"""Victims and the choice of a node as slow plain code, by the rules of docs/facts/scheduler.md.

It sees nodes and pods as plain values, and knows cpu, the count of pods and host ports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OraclePod:
    name: str
    priority: int
    cpu: int
    start: float = 0.0
    app: str = ""
    port: int = 0
    spared: bool = False


@dataclass(frozen=True)
class OracleNode:
    name: str
    cpu: int
    most_pods: int
    pods: tuple[OraclePod, ...] = ()
    promised: tuple[OraclePod, ...] = ()


@dataclass
class OracleBudgets:
    """App -> evictions that its budget allows, and names of pods that count as disrupted."""

    allowed: Mapping[str, int] = field(default_factory=dict)
    disrupted: frozenset[str] = frozenset()

    def beyond(self, pods: Sequence[OraclePod]) -> set[str]:
        left = dict(self.allowed)
        result = set()
        for pod in pods:
            if pod.app in left and pod.name not in self.disrupted:
                left[pod.app] -= 1
                if left[pod.app] < 0:
                    result.add(pod.name)
        return result


def fits(pod: OraclePod, node: OracleNode, staying: Sequence[OraclePod]) -> bool:
    more = [other for other in node.promised if other.priority >= pod.priority]
    for others in ([*staying, *more], staying):
        if len(others) + 1 > node.most_pods:
            return False
        if pod.cpu > 0 and sum(other.cpu for other in others) + pod.cpu > node.cpu:
            return False
        if pod.port and any(other.port == pod.port for other in others):
            return False
    return True


def victims(
    pod: OraclePod, node: OracleNode, budgets: OracleBudgets
) -> tuple[list[OraclePod], int] | None:
    """Return the victims, most important first, and how many go beyond a budget."""
    evictable = [each for each in node.pods if each.priority < pod.priority and not each.spared]
    evictable.sort(key=lambda each: (-each.priority, each.start, each.name))
    if not evictable:
        return None
    staying = [each for each in node.pods if each not in evictable]
    if not fits(pod, node, staying):
        return None
    beyond = budgets.beyond(evictable)
    gone = []
    first = [each for each in evictable if each.name in beyond]
    then = [each for each in evictable if each.name not in beyond]
    for each in first + then:
        if fits(pod, node, [*staying, each]):
            staying.append(each)
        else:
            gone.append(each)
    gone.sort(key=lambda each: (-each.priority, each.start, each.name))
    return gone, sum(each.name in beyond for each in gone)


def cost(gone: Sequence[OraclePod], violations: int) -> tuple[float, ...]:
    if not gone:
        return (0, -(2**32), 0, 0, 0)
    highest = gone[0].priority
    return (
        violations,
        highest,
        sum(each.priority + 2**31 for each in gone),
        len(gone),
        -min(each.start for each in gone if each.priority == highest),
    )
