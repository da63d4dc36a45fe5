"""/metrics/resources: what each pod of the cluster requests, and its limits.

As kube-scheduler's: pods that have ended are left out, and so are amounts of 0.
docs/facts/scheduler.md, "Metrics".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from apis.core import is_terminated
from apis.keys import CPU, MEMORY
from apis.scheduling_pod import SchedulingPod
from cluster.exposition import head_lines, label_text, number_text
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.shapes import PodShape

_LABELS: Final = ("namespace", "pod", "node", "scheduler", "priority", "resource", "unit")
_BYTES: Final = frozenset({MEMORY, "storage", "ephemeral-storage"})
_HUGE_PAGES: Final = "hugepages-"

_NAMES: Final = (
    ("kube_pod_resource_request", "What pods request, as the scheduler counts it."),
    ("kube_pod_resource_limit", "The limits of pods, counted as requests are."),
)


def pod_lines(
    pods: Iterable[SchedulingPod], shape_of: Callable[[SchedulingPod], PodShape]
) -> Iterator[str]:
    """Yield the lines of all pods. Pods may come and go meanwhile."""
    pods = tuple(pods)
    for number, (name, text) in enumerate(_NAMES):
        yield head_lines(name, text)
        for pod in pods:
            if is_terminated(pod):
                continue
            shape = shape_of(pod)
            amounts = (shape.requests, shape.limits)[number]
            yield from _lines(name, pod, amounts)


def _lines(name: str, pod: SchedulingPod, amounts: Amounts) -> Iterator[str]:
    meta, spec = pod.metadata, pod.spec
    priority = "" if spec.priority is None else str(spec.priority)
    for resource, amount in amounts.items():
        if not amount:
            continue
        unit = "integer"
        value: float = amount
        if resource == CPU:
            unit, value = "cores", amount / 1000
        elif resource in _BYTES or resource.startswith(_HUGE_PAGES):
            unit = "bytes"
        labels = label_text(
            _LABELS,
            (
                meta.namespace,
                meta.name,
                spec.node_name,
                spec.scheduler_name,
                priority,
                resource,
                unit,
            ),
        )
        yield f"{name}{{{labels}}} {number_text(value)}\n"
