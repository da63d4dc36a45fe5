"""Batch resources: the CPU and memory of a node that batch pods may use.

    batch = capacity - margin - system - high-priority pods, at least 0, at most a share of capacity

The policies differ in how a high-priority pod counts: docs/facts/manager.md, "Batch resources" and
"Batch resources of NUMA zones". Upstream omits pods without a report (`maxUsageRequest`) and host
applications without a priority. Both count here, since their CPU and memory are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from apis.explanation import Explanation, Term
from apis.keys import BATCH_CPU, BATCH_MEMORY
from apis.qos import PriorityClass
from apis.slo_config import ColocationStrategy
from cluster.manager.amounts import Amount, total, truncate
from cluster.manager.node_inputs import NodeInputs, PodFacts

_HIGH_PRIORITY_HOST: Final = frozenset({PriorityClass.PROD, PriorityClass.MID, PriorityClass.NONE})


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Resources in milli-cores and bytes, before normalisation, and the terms of their formulas."""

    amount: Amount
    explanations: dict[str, Explanation]


@dataclass(frozen=True, slots=True)
class PodSums:
    """The sums over high-priority pods that the policies subtract."""

    used: Amount
    requested: Amount
    larger: Amount


def pod_sums(
    inputs: NodeInputs, share: Callable[[PodFacts, Amount], Amount], dangling: Amount
) -> PodSums:
    """Return the sums over high-priority pods.

    share: (pod, amount) -> the part of the amount that counts: all for a node, less for a zone.
    dangling: use of reported pods that the API server does not list.
    """
    used: list[Amount] = [dangling]
    requested: list[Amount] = []
    larger: list[Amount] = [dangling]
    usage = inputs.pod_usage
    for pod in inputs.high_priority_pods:
        found = usage.get(pod.key)
        request = share(pod, pod.request)
        requested.append(request)
        if found is None:
            # Not reported yet: its containers start, and may use what the pod requested.
            used.append(request)
            larger.append(request)
            continue
        measured = share(pod, found)
        # An LSE pod has its CPUs exclusively, whether it uses them or not.
        used.append(Amount(request.cpu, measured.memory) if pod.lse else measured)
        larger.append(request.largest(measured))
    return PodSums(total(used), total(requested), total(larger))


def batch_resources(inputs: NodeInputs, strategy: ColocationStrategy) -> BatchResult:
    """Return the batch resources of a node whose report is fresh."""
    host = inputs.host_usage(_HIGH_PRIORITY_HOST)
    parts = _Parts(
        capacity=inputs.capacity,
        system=(inputs.system_usage + host).largest(inputs.reserved),
        reserved=inputs.reserved,
        sums=pod_sums(inputs, _whole, inputs.dangling_usage),
    )
    cpu, memory = (_left(rule, parts, _sources(rule, inputs, host)) for rule in _rules(strategy))
    return BatchResult(Amount(cpu.result, memory.result), {BATCH_CPU: cpu, BATCH_MEMORY: memory})


def batch_zone_resources(
    inputs: NodeInputs, zones: dict[int, Amount], strategy: ColocationStrategy
) -> dict[int, Amount]:
    """Return the batch resources of each NUMA node.

    zones: NUMA node -> allocatable of its zone. System use and reservations are divided evenly. A
    pod is divided over the NUMA nodes that it is bound to, otherwise over all.
    """
    count = len(zones)
    if not count:
        return {}
    host = inputs.host_usage(_HIGH_PRIORITY_HOST)
    system = (inputs.system_usage + host).largest(inputs.reserved).split(count)
    reserved = inputs.reserved.split(count)
    dangling = inputs.dangling_usage.split(count)
    result: dict[int, Amount] = {}
    for zone, allocatable in zones.items():

        def share(pod: PodFacts, amount: Amount, zone: int = zone) -> Amount:
            bound = [node for node in pod.numa_nodes if node in zones]
            if not bound:
                return amount.split(count)
            return amount.split(len(bound)) if zone in bound else Amount()

        parts = _Parts(allocatable, system, reserved, pod_sums(inputs, share, dangling))
        result[zone] = Amount(*(_left(rule, parts, {}).result for rule in _rules(strategy)))
    return result


def _whole(pod: PodFacts, amount: Amount) -> Amount:
    return amount


@dataclass(frozen=True, slots=True)
class _Parts:
    """The capacity of a node or NUMA node, and the amounts that a policy may subtract."""

    capacity: Amount
    system: Amount
    reserved: Amount
    sums: PodSums


@dataclass(frozen=True, slots=True)
class _Rule:
    """How cpu or memory is computed. Percentages are of the capacity."""

    amount_of: Callable[[Amount], int]
    policy: str
    reclaim_percent: int
    most_percent: int | None


def _rules(strategy: ColocationStrategy) -> tuple[_Rule, _Rule]:
    """Return the rules of cpu and of memory. The policy `request` exists for memory only."""
    cpu_policy = strategy.cpu_calculate_policy
    return (
        _Rule(
            lambda amount: amount.cpu,
            "usage" if cpu_policy == "request" else cpu_policy,
            strategy.cpu_reclaim_threshold_percent,
            strategy.batch_cpu_threshold_percent,
        ),
        _Rule(
            lambda amount: amount.memory,
            strategy.memory_calculate_policy,
            strategy.memory_reclaim_threshold_percent,
            strategy.batch_memory_threshold_percent,
        ),
    )


_Sources = Mapping[str, tuple[str, str | None]]
"""Term -> (its source, time of the report that it is from)."""


def _left(rule: _Rule, parts: _Parts, sources: _Sources) -> Explanation:
    """Return the amount that is left for batch pods, with the terms of its formula."""
    of = rule.amount_of
    capacity = of(parts.capacity)
    against = {"margin": truncate(capacity * (100 - rule.reclaim_percent), 100)}
    match rule.policy:
        case "request":
            against["reserved"] = of(parts.reserved)
            against["hp_request"] = of(parts.sums.requested)
        case "maxUsageRequest":
            against["system_used"] = of(parts.system)
            against["hp_max"] = of(parts.sums.larger)
        case _:
            against["system_used"] = of(parts.system)
            against["hp_used"] = of(parts.sums.used)
    terms = {"capacity": capacity, **against}
    result = max(capacity - sum(against.values()), 0)
    formula = f"max({' - '.join(terms)}, 0)"
    if rule.most_percent is not None:
        terms["cap"] = truncate(capacity * rule.most_percent, 100)
        result = min(result, terms["cap"])
        formula = f"min({formula}, cap)"
    return Explanation(
        formula,
        result,
        tuple(Term(name, value, *sources.get(name, ())) for name, value in terms.items()),
    )


def _sources(rule: _Rule, inputs: NodeInputs, host: Amount) -> _Sources:
    name = inputs.node.metadata.name
    reported = inputs.report.at if inputs.report is not None else None
    of = rule.amount_of
    return {
        "capacity": (f"Node {name} status.capacity", None),
        "margin": (
            f"colocation-config: {100 - rule.reclaim_percent} percent of capacity kept",
            None,
        ),
        "reserved": (f"Node {name} kubelet and annotation", None),
        "hp_request": ("requests of pods above batch", None),
        "system_used": (
            f"max(NodeMetric {name} systemUsage {of(inputs.system_usage)} "
            f"+ host applications {of(host)}, reserved {of(inputs.reserved)})",
            reported,
        ),
        "hp_max": (f"max(request, use) by NodeMetric {name}", reported),
        "hp_used": (f"pods above batch by NodeMetric {name}", reported),
        "cap": (f"colocation-config: {rule.most_percent} percent of capacity", None),
    }


def amplified(batch_milli_cpu: int, ratio_percent: int) -> int:
    """Return batch-cpu on a node whose CPUs have `ratio_percent` percent of the reference speed.

    As upstream rounds: to thousandths of a milli-core downwards, then up to whole milli-cores. A
    ratio of at most 100 changes nothing.
    """
    if ratio_percent <= 100:
        return batch_milli_cpu
    thousandths = batch_milli_cpu * 1000 * ratio_percent // 100
    return -(-thousandths // 1000)
