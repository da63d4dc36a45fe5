"""The gauges of all quotas, made from the table when they are read. cpu is in milli-cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cluster.exposition import label_text, number_text
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.quotas.figures import QuotaFigures, figures
from cluster.scheduler.tables.quotas.table import QuotaTable

_LABELS: Final = ("name", "resource", "tree", "is_parent", "parent", "field")


def _spec(found: QuotaFigures) -> dict[str, Amounts]:
    return {"min": found.least, "max": found.most, "sharedWeight": found.weight}


def _status(found: QuotaFigures) -> dict[str, Amounts]:
    return {
        "used": found.used,
        "runtime": found.runtime,
        "request": found.request,
        "child-request": found.child_request,
        "guaranteed": found.guaranteed,
        "allocated": found.allocated,
        "non-preemptible-request": found.firm_request,
        "non-preemptible-used": found.firm_used,
        "unschedulable-resource": found.unschedulable,
    }


def quota_lines(table: QuotaTable) -> Iterator[str]:
    """Yield the lines of scheduler_elastic_quota_spec and _status. Quotas may change meanwhile."""
    for name, text, fields_of in (
        ("scheduler_elastic_quota_spec", "What quotas say.", _spec),
        ("scheduler_elastic_quota_status", "What quotas request, use and may use.", _status),
    ):
        yield f"# HELP {name} {text}\n# TYPE {name} gauge\n"
        for quota in tuple(table.quotas):
            found = figures(table, quota)
            if found is None:
                continue
            for field, amounts in fields_of(found).items():
                for resource, amount in amounts.items():
                    labels = label_text(
                        _LABELS,
                        (
                            found.name,
                            resource,
                            found.tree,
                            str(found.is_parent).lower(),
                            found.parent,
                            field,
                        ),
                    )
                    yield f"{name}{{{labels}}} {number_text(amount)}\n"
