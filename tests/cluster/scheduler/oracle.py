"""What kube-scheduler's node plugins decide, node by node and pod by pod, as slow plain code.

Written from docs/facts/scheduler.md, not from the columns: it sees objects only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from apis.core import pod_requests
from apis.quantity import ZERO, Quantity
from apis.scheduling_pod import (
    NodeSelectorRequirement,
    NodeSelectorTerm,
    SchedulingNode,
    SchedulingPod,
)


@dataclass
class OracleNode:
    node: SchedulingNode
    pods: list[SchedulingPod] = field(default_factory=list)

    def requested(self, name: str) -> Quantity:
        return sum((pod_requests(pod).get(name, ZERO) for pod in self.pods), start=ZERO)


def unschedulable(pod: SchedulingPod, on: OracleNode) -> list[str]:
    if not on.node.spec.unschedulable:
        return []
    for toleration in pod.spec.tolerations:
        if (
            toleration.key in ("", "node.kubernetes.io/unschedulable")
            and toleration.effect in ("", "NoSchedule")
            and (toleration.operator == "Exists" or toleration.value == "")
        ):
            return []
    return ["node(s) were unschedulable"]


def _tolerates(pod: SchedulingPod, key: str, value: str, effect: str) -> bool:
    for toleration in pod.spec.tolerations:
        if toleration.effect not in ("", effect):
            continue
        if toleration.key not in ("", key):
            continue
        if toleration.operator == "Exists" or toleration.value == value:
            return True
    return False


def taints(pod: SchedulingPod, on: OracleNode) -> list[str]:
    for taint in on.node.spec.taints:
        if taint.effect == "PreferNoSchedule":
            continue
        if not _tolerates(pod, taint.key, taint.value, taint.effect):
            return ["node(s) had untolerated taint(s)"]
    return []


def _requirement(requirement: NodeSelectorRequirement, labels: dict[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value in requirement.values
        case "NotIn":
            return value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(requirement.values[0])
        case "Lt":
            return value is not None and value.isdigit() and int(value) < int(requirement.values[0])
    return False


def _term(term: NodeSelectorTerm, node: SchedulingNode) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    return all(_requirement(r, node.metadata.labels) for r in term.match_expressions) and all(
        _requirement(r, {"metadata.name": node.metadata.name}) for r in term.match_fields
    )


def affinity(pod: SchedulingPod, on: OracleNode) -> list[str]:
    labels = on.node.metadata.labels
    holds = all(labels.get(key) == value for key, value in pod.spec.node_selector.items())
    own = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    if own is not None and own.required is not None:
        holds = holds and any(_term(term, on.node) for term in own.required.node_selector_terms)
    return [] if holds else ["node(s) didn't match Pod's node affinity/selector"]


def preferred(pod: SchedulingPod, on: OracleNode) -> int:
    own = pod.spec.affinity.node_affinity if pod.spec.affinity else None
    if own is None:
        return 0
    return sum(p.weight for p in own.preferred if _term(p.preference, on.node))


def ports(pod: SchedulingPod, on: OracleNode) -> list[str]:
    def used(of: SchedulingPod) -> list[tuple[str, int, str]]:
        return [
            (port.protocol, port.host_port, port.host_ip or "0.0.0.0")
            for container in (*of.spec.containers, *of.spec.init_containers)
            for port in container.ports
            if port.host_port
            and (container in of.spec.containers or container.restart_policy == "Always")
        ]

    for protocol, number, address in used(pod):
        for other in on.pods:
            for taken, its_number, its_address in used(other):
                same = (protocol, number) == (taken, its_number)
                if same and (address == its_address or "0.0.0.0" in (address, its_address)):
                    return ["node(s) didn't have free ports for the requested pod ports"]
    return []


def fit(pod: SchedulingPod, on: OracleNode) -> list[str]:
    allocatable = on.node.status.allocatable
    reasons = []
    if len(on.pods) + 1 > allocatable.get("pods", ZERO).value():
        reasons.append("Too many pods")
    for name, request in pod_requests(pod).items():
        left = allocatable.get(name, ZERO) - on.requested(name)
        if request > ZERO and request > left:
            reasons.append(f"Insufficient {name}")
    return reasons


def scored(pod: SchedulingPod, name: str) -> int:
    """cpu in milli-cores, memory in bytes, with defaults; for pods without init containers."""
    total = 0
    for container in pod.spec.containers:
        request = container.resources.requests.get(name)
        if request is None:
            total += 100 if name == "cpu" else 209715200
        else:
            total += request.milli_value() if name == "cpu" else request.value()
    return total


def least_allocated(pod: SchedulingPod, on: OracleNode, *, most: bool = False) -> int:
    sums = weights = 0
    for name in ("cpu", "memory"):
        quantity = on.node.status.allocatable.get(name, ZERO)
        cap = quantity.milli_value() if name == "cpu" else quantity.value()
        if cap == 0:
            continue
        req = sum(scored(other, name) for other in (*on.pods, pod))
        if most:
            sums += min(req, cap) * 100 // cap
        else:
            sums += 0 if req > cap else (cap - req) * 100 // cap
        weights += 1
    return sums // weights if weights else 0


def balanced(pod: SchedulingPod, on: OracleNode) -> int:
    after = _evenness(on, pod_requests(pod))
    return 75 + (after - _evenness(on, {})) // 2


def _evenness(on: OracleNode, more: Mapping[str, Quantity]) -> int:
    fractions = []
    for name in ("cpu", "memory"):
        cap = on.node.status.allocatable.get(name, ZERO)
        if cap > ZERO:
            req = on.requested(name) + more.get(name, ZERO)
            fractions.append(min(1.0, req.nano / cap.nano))
    if len(fractions) < 2:
        return 100
    return int((1 - abs(fractions[0] - fractions[1]) / 2) * 100)


def image_locality(pod: SchedulingPod, on: OracleNode, cluster: Sequence[OracleNode]) -> int:
    mib = 1024 * 1024
    total = 0
    images = [each.image for each in (*pod.spec.containers, *pod.spec.init_containers)]
    most = 1000 * mib * len(images)
    images += [volume.image.reference for volume in pod.spec.volumes if volume.image]
    for image in images:
        name = image if ":" in image else f"{image}:latest"

        def size(node: SchedulingNode, name: str = name) -> int:
            return next((i.size_bytes for i in node.status.images if name in i.names), 0)

        having = sum(1 for other in cluster if size(other.node))
        total += int(size(on.node) * (having / len(cluster)))
    return 100 * (min(max(total, 23 * mib), most) - 23 * mib) // (most - 23 * mib)
