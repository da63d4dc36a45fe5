"""Mid resources: what Prod pods requested and, by prediction, will not use.

    mid = min(max(min(reclaimable, unused), 0) + share of unallocated, share of capacity)

In static mode they are a fixed share of the capacity. Terms and an example:
docs/facts/manager.md, "Mid resources".
"""

from __future__ import annotations

from typing import Final

from apis.explanation import Explanation, Term
from apis.keys import MID_CPU, MID_MEMORY
from apis.qos import PriorityClass
from apis.slo_config import ColocationStrategy
from cluster.manager.amounts import NOTHING, Amount, total
from cluster.manager.batch import BatchResult
from cluster.manager.node_inputs import NodeInputs

_PROD_HOST: Final = frozenset({PriorityClass.PROD, PriorityClass.NONE})
_NOT_PROD: Final = frozenset({PriorityClass.MID, PriorityClass.BATCH, PriorityClass.FREE})

STATIC: Final = "static"


def mid_resources(inputs: NodeInputs, strategy: ColocationStrategy) -> BatchResult:
    """Return the mid resources of a node whose report is fresh, milli-cores and bytes."""
    capacity = inputs.capacity
    ceiling = capacity.percent(
        strategy.mid_cpu_threshold_percent, strategy.mid_memory_threshold_percent
    )
    if strategy.mid_reclaim_mode == STATIC:
        share = capacity.percent(
            strategy.mid_static_cpu_reserved_percent, strategy.mid_static_memory_reserved_percent
        )
        result = share.smallest(ceiling)
        terms = {"static_share": share, "ceiling": ceiling}
        return BatchResult(result, _explain(inputs, "min(static_share, ceiling)", terms, result))
    report = inputs.report
    reclaimable = report.reclaimable if report is not None else NOTHING
    # If the use of the whole node is not reported, nothing counts as unused.
    unused = (
        inputs.capacity - report.node if report is not None and report.node is not None else NOTHING
    )
    system = inputs.reserved.largest(inputs.system_usage + inputs.host_usage(_PROD_HOST))
    requested = total(pod.request for pod in inputs.pods if pod.priority not in _NOT_PROD)
    unallocated = (capacity - system - requested).at_least_zero()
    percent = strategy.mid_unallocated_percent
    extra = unallocated.percent(percent, percent)
    result = (reclaimable.smallest(unused).at_least_zero() + extra).smallest(ceiling)
    terms = {
        "reclaimable": reclaimable,
        "unused": unused,
        "unallocated_share": extra,
        "ceiling": ceiling,
    }
    formula = "min(max(min(reclaimable, unused), 0) + unallocated_share, ceiling)"
    return BatchResult(result, _explain(inputs, formula, terms, result))


def _explain(
    inputs: NodeInputs, formula: str, terms: dict[str, Amount], result: Amount
) -> dict[str, Explanation]:
    name = inputs.node.metadata.name
    reported = inputs.report.at if inputs.report is not None else None
    sources = {
        "reclaimable": (f"NodeMetric {name} prodReclaimableMetric", reported),
        "unused": (f"Node {name} capacity - NodeMetric {name} nodeUsage", reported),
        "unallocated_share": (
            "colocation-config midUnallocatedPercent of capacity - system - Prod requests",
            reported,
        ),
        "ceiling": ("colocation-config mid threshold percent of capacity", None),
        "static_share": ("colocation-config midStatic reserved percent of capacity", None),
    }
    return {
        resource: Explanation(
            formula,
            getattr(result, member),
            tuple(
                Term(name_, getattr(amount, member), *sources[name_])
                for name_, amount in terms.items()
            ),
        )
        for resource, member in ((MID_CPU, "cpu"), (MID_MEMORY, "memory"))
    }
