"""Batch resources: what best-effort pods may use of a node beyond what others need.

    batch = capacity - margin - system - high-priority pods, at least 0, at most a share of capacity

The policies differ in what a high-priority pod counts for. Source: manager.md section 8. Where
upstream forgets pods without a metric (`maxUsageRequest`) or host applications without a priority,
both count here: forgetting them hands out memory and CPU that are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from apis.explanation import Explanation, Term
from apis.keys import BATCH_CPU, BATCH_MEMORY
from apis.qos import PriorityClass
from apis.slo_config import ColocationStrategy
from cluster.manager.node_inputs import Amount, NodeInputs, PodFacts, total

_HIGH_PRIORITY_HOST: Final = frozenset({PriorityClass.PROD, PriorityClass.MID, PriorityClass.NONE})

MAX_USAGE_REQUEST: Final = "maxUsageRequest"
REQUEST: Final = "request"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Milli-cores and bytes for batch pods, before amplification, and how they came about."""

    amount: Amount
    explanations: dict[str, Explanation]


@dataclass(frozen=True, slots=True)
class PodSums:
    """What high-priority pods count for, under each policy."""

    used: Amount
    requested: Amount
    larger: Amount


def pod_sums(
    inputs: NodeInputs, share: Callable[[PodFacts, Amount], Amount], dangling: Amount
) -> PodSums:
    """Sum over high-priority pods; `share` says how much of a pod's amount counts here."""
    used: list[Amount] = [dangling]
    requested: list[Amount] = []
    larger: list[Amount] = [dangling]
    usage = inputs.pod_usage
    for pod in inputs.high_priority_pods:
        found = usage.get(pod.key)
        request = share(pod, pod.request)
        requested.append(request)
        if found is None:
            # Its containers are starting: it will use up to what it asked for.
            used.append(request)
            larger.append(request)
            continue
        measured = share(pod, found)
        # LSE pods own their CPUs whether they use them or not.
        used.append(Amount(request.cpu, measured.memory) if pod.lse else measured)
        larger.append(request.largest(measured))
    return PodSums(total(used), total(requested), total(larger))


def batch_resources(inputs: NodeInputs, strategy: ColocationStrategy) -> BatchResult:
    """Return the batch resources of a node whose report is fresh."""
    host = inputs.host_usage(_HIGH_PRIORITY_HOST)
    system = (inputs.system_usage + host).largest(inputs.reserved)
    sums = pod_sums(inputs, _whole, inputs.dangling_usage)
    amount = _left(
        inputs.capacity, system=system, reserved=inputs.reserved, sums=sums, strategy=strategy
    )
    return BatchResult(amount, _explain(inputs, strategy, system, host, sums, amount))


def batch_zone_resources(
    inputs: NodeInputs, zones: dict[int, Amount], strategy: ColocationStrategy
) -> dict[int, Amount]:
    """Return the batch resources of each NUMA node.

    zones: NUMA node -> allocatable of its zone. System use and reservations spread evenly, a pod
    over the NUMA nodes that it is bound to, else over all.
    """
    parts = len(zones)
    if not parts:
        return {}
    host = inputs.host_usage(_HIGH_PRIORITY_HOST)
    system = (inputs.system_usage + host).largest(inputs.reserved).split(parts)
    reserved = inputs.reserved.split(parts)
    dangling = inputs.dangling_usage.split(parts)
    result: dict[int, Amount] = {}
    for zone, allocatable in zones.items():

        def share(pod: PodFacts, amount: Amount, zone: int = zone) -> Amount:
            bound = [node for node in pod.numa_nodes if node in zones]
            if not bound:
                return amount.split(parts)
            return amount.split(len(bound)) if zone in bound else Amount()

        sums = pod_sums(inputs, share, dangling)
        result[zone] = _left(
            allocatable, system=system, reserved=reserved, sums=sums, strategy=strategy
        )
    return result


def _whole(pod: PodFacts, amount: Amount) -> Amount:
    return amount


def _margin(base: Amount, strategy: ColocationStrategy) -> Amount:
    return base.percent(
        100 - strategy.cpu_reclaim_threshold_percent,
        100 - strategy.memory_reclaim_threshold_percent,
    )


def _left(
    base: Amount,
    *,
    system: Amount,
    reserved: Amount,
    sums: PodSums,
    strategy: ColocationStrategy,
) -> Amount:
    free = base - _margin(base, strategy)
    by_usage = free - system - sums.used
    by_larger = free - system - sums.larger
    by_request = free - reserved - sums.requested
    cpu = by_larger.cpu if strategy.cpu_calculate_policy == MAX_USAGE_REQUEST else by_usage.cpu
    match strategy.memory_calculate_policy:
        case "maxUsageRequest":
            memory = by_larger.memory
        case "request":
            memory = by_request.memory
        case _:
            memory = by_usage.memory
    cap_cpu, cap_memory = (
        strategy.batch_cpu_threshold_percent,
        strategy.batch_memory_threshold_percent,
    )
    share = base.percent(cap_cpu or 0, cap_memory or 0)
    if cap_cpu is not None:
        cpu = min(cpu, share.cpu)
    if cap_memory is not None:
        memory = min(memory, share.memory)
    return Amount(cpu, memory).at_least_zero()


def _explain(
    inputs: NodeInputs,
    strategy: ColocationStrategy,
    system: Amount,
    host: Amount,
    sums: PodSums,
    result: Amount,
) -> dict[str, Explanation]:
    name = inputs.node.metadata.name
    reported = inputs.metric.update_time if inputs.metric else None
    margin = _margin(inputs.capacity, strategy)
    share = inputs.capacity.percent(
        strategy.batch_cpu_threshold_percent or 0, strategy.batch_memory_threshold_percent or 0
    )
    explanations: dict[str, Explanation] = {}
    for resource, member, policy, percent, capped in (
        (
            BATCH_CPU,
            "cpu",
            strategy.cpu_calculate_policy,
            strategy.cpu_reclaim_threshold_percent,
            strategy.batch_cpu_threshold_percent,
        ),
        (
            BATCH_MEMORY,
            "memory",
            strategy.memory_calculate_policy,
            strategy.memory_reclaim_threshold_percent,
            strategy.batch_memory_threshold_percent,
        ),
    ):

        def of(amount: Amount, member: str = member) -> int:
            return int(getattr(amount, member))

        by_request = policy == REQUEST and member == "memory"
        terms = [
            Term("capacity", of(inputs.capacity), f"Node {name} status.capacity"),
            Term(
                "margin", of(margin), f"colocation-config: {100 - percent} percent of capacity kept"
            ),
        ]
        if by_request:
            terms.append(
                Term("reserved", of(inputs.reserved), f"Node {name} kubelet and annotation")
            )
            terms.append(Term("hp_request", of(sums.requested), "requests of pods above batch"))
            formula = "max(capacity - margin - reserved - hp_request, 0)"
        else:
            terms += [
                Term(
                    "system_used",
                    of(system),
                    f"max(NodeMetric {name} systemUsage {of(inputs.system_usage)} "
                    f"+ host applications {of(host)}, reserved {of(inputs.reserved)})",
                    reported,
                ),
            ]
            if policy == MAX_USAGE_REQUEST:
                terms.append(
                    Term(
                        "hp_max",
                        of(sums.larger),
                        f"max(request, use) by NodeMetric {name}",
                        reported,
                    )
                )
                formula = "max(capacity - margin - system_used - hp_max, 0)"
            else:
                terms.append(
                    Term(
                        "hp_used", of(sums.used), f"pods above batch by NodeMetric {name}", reported
                    )
                )
                formula = "max(capacity - margin - system_used - hp_used, 0)"
        if capped is not None:
            terms.append(Term("cap", of(share), f"colocation-config: {capped} percent of capacity"))
            formula = f"min({formula}, cap)"
        explanations[resource] = Explanation(formula, of(result), tuple(terms))
    return explanations


def amplified(batch_milli_cpu: int, ratio_percent: int) -> int:
    """Return batch-cpu on a node whose CPUs are `ratio_percent` percent of the reference's.

    Thousandths are truncated first, then the rest rounds up to whole milli-cores.
    """
    if ratio_percent <= 100:
        return batch_milli_cpu
    thousandths = batch_milli_cpu * 1000 * ratio_percent // 100
    return -(-thousandths // 1000)
