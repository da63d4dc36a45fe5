"""What the configurable resource scores are on one node, as slow plain code over objects.

Written from the rules of docs/facts/scheduler.md, "Resource scores", and docs/scheduler.md, "Small
plugins". For pods without init containers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from apis.core import pod_requests
from apis.quantity import ZERO, Quantity
from apis.scheduling_pod import SchedulingPod
from tests.cluster.scheduler.oracle import OracleNode, scored

Part = Callable[[int, int], int]
"""Scores a resource by (requested with the pod, allocatable)."""


def units(name: str, quantity: Quantity) -> int:
    return quantity.milli_value() if name == "cpu" else quantity.value()


def requested(pod: SchedulingPod, name: str) -> int:
    return units(name, pod_requests(pod).get(name, ZERO))


def capacity(on: OracleNode, name: str) -> int:
    return units(name, on.node.status.allocatable.get(name, ZERO))


def use(pod: SchedulingPod, on: OracleNode, name: str) -> int:
    """Return what would be requested of a node; cpu and memory with the defaults of containers."""
    each = scored if name in ("cpu", "memory") else requested
    return sum(each(one, name) for one in (*on.pods, pod))


def least(req: int, cap: int) -> int:
    return max(0, cap - req) * 100 // cap


def most(req: int, cap: int) -> int:
    return min(req, cap) * 100 // cap


def ratio(points: Iterable[tuple[int, int]]) -> Part:
    """points: (percent in use, score 0..10); constant outside of them, linear between them."""

    def of(req: int, cap: int) -> int:
        percent = min(req * 100 // cap, 100)
        left: tuple[int, int] | None = None
        for point in points:
            if percent <= point[0]:
                if left is None or percent == point[0]:
                    return 10 * point[1]
                # Integer steps that truncate towards zero.
                rise = 10 * (point[1] - left[1]) * (percent - left[0])
                sign = -1 if rise < 0 else 1
                return 10 * left[1] + sign * (abs(rise) // (point[0] - left[0]))
            left = point
        assert left is not None
        return 10 * left[1]

    return of


def fit(
    pod: SchedulingPod,
    on: OracleNode,
    weights: Mapping[str, int],
    part: Part,
    *,
    by_ratio: bool = False,
) -> int:
    """Return NodeResourcesFit's score. by_ratio: scores of 0 do not count, and it is rounded."""
    total = whole = 0
    for name, weight in weights.items():
        cap = capacity(on, name)
        if cap == 0 or ("/" in name and not requested(pod, name)):
            continue
        score = part(use(pod, on, name), cap)
        if by_ratio and score == 0:
            continue
        total += weight * score
        whole += weight
    if not whole:
        return 0
    return math.floor(total / whole + 0.5) if by_ratio else total // whole


def fit_plus(pod: SchedulingPod, on: OracleNode, strategies: Mapping[str, tuple[bool, int]]) -> int:
    """strategies: resource -> (whether fuller nodes come first, weight)."""
    total = whole = 0
    for name, (fuller, weight) in strategies.items():
        if not requested(pod, name):
            continue
        cap = capacity(on, name)
        part = most if fuller else least
        total += weight * (part(use(pod, on, name), cap) if cap else 0)
        whole += weight
    return total // whole if whole else 100


def scarce(pod: SchedulingPod, on: OracleNode, names: Iterable[str]) -> int:
    idle = {
        name
        for name in on.node.status.allocatable
        if name != "pods" and capacity(on, name) and not requested(pod, name)
    }
    avoided = idle & set(names)
    return (len(idle) - len(avoided)) * 100 // len(idle) if avoided else 100


def balanced(pod: SchedulingPod, on: OracleNode, names: Iterable[str]) -> int:
    """Return 75, and half of what the pod changes in how evenly the resources are used."""
    counted = [
        name for name in names if capacity(on, name) and ("/" not in name or requested(pod, name))
    ]

    def evenness(pods: Iterable[SchedulingPod]) -> int:
        parts = []
        for name in counted:
            used = sum(requested(each, name) for each in pods)
            parts.append(min(1.0, used / capacity(on, name)))
        if len(parts) == 2:
            deviation = abs(parts[0] - parts[1]) / 2
        elif parts:
            mean = sum(parts) / len(parts)
            deviation = math.sqrt(sum((part - mean) ** 2 for part in parts) / len(parts))
        else:
            deviation = 0.0
        return int((1 - deviation) * 100)

    return 75 + (evenness([*on.pods, pod]) - evenness(on.pods)) // 2


def taints_left(pod: SchedulingPod, on: OracleNode) -> int:
    """Return the count of PreferNoSchedule taints that the pod does not tolerate."""

    def tolerated(key: str, value: str) -> bool:
        return any(
            each.effect in ("", "PreferNoSchedule")
            and each.key in ("", key)
            and (each.operator == "Exists" or each.value == value)
            for each in pod.spec.tolerations
        )

    return sum(
        taint.effect == "PreferNoSchedule" and not tolerated(taint.key, taint.value)
        for taint in on.node.spec.taints
    )


def fewest_first(counts: list[int]) -> list[int]:
    """Scale counts so that 0 becomes 100 and the largest 0."""
    largest = max(counts, default=0)
    return [100 - count * 100 // largest if largest else 100 for count in counts]


def largest_first(sums: list[int]) -> list[int]:
    """Scale sums so that the largest becomes 100."""
    largest = max(sums, default=0)
    return [each * 100 // largest if largest else 0 for each in sums]
