"""Metrics of single containers: OOM scores, core scheduling cookies, batch and mid amounts.

Names and labels are upstream's: docs/facts/koordlet.md, "Metrics". The values are read at each
scrape, so a series exists exactly while its value is in force, and nothing expires.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from apis.keys import BATCH_CPU, BATCH_MEMORY, MID_CPU, MID_MEMORY
from hooks.state import State
from hooks.subject import Amounts, ContainerSubject, SandboxSubject, Subject
from koordlet.executor.slots import ResourceView
from linux.resources import Resource

OF_PROCESSES: Final = frozenset({Resource.OOM_SCORE_ADJ, Resource.CORE_SCHED_COOKIE})
"""Resources with one series per container."""

Standing = tuple[Subject, ResourceView]
"""A subject, and the state of one of its values."""
CookieKey = tuple[str, str]
"""(core scheduling group, "succeeded" or "failed")."""

_POD: Final = ["node", "pod_name", "pod_namespace", "pod_uid"]
_IN_FORCE: Final = frozenset({State.APPLIED, State.DEGRADED})


def of_processes(node: str, standing: Iterable[Standing]) -> Iterator[Metric]:
    """Yield the scores and cookies that all processes of a container hold."""
    scores = GaugeMetricFamily(
        "koordlet_container_oom_score_adj",
        "OOM score adjustment of the container's processes, where a policy sets it.",
        labels=[*_POD, "container_name"],
    )
    cookies = GaugeMetricFamily(
        "koordlet_container_core_sched_cookie",
        "1 for the core scheduling cookie of the container's processes.",
        labels=[
            *_POD,
            "container_name",
            "container_id",
            "core_sched_group",
            "core_sched_cookie",
        ],
    )
    for subject, view in standing:
        if view.state not in _IN_FORCE or not isinstance(
            subject, ContainerSubject | SandboxSubject
        ):
            continue
        pod = [node, subject.pod.name, subject.pod.namespace, subject.pod.uid]
        name = subject.name if isinstance(subject, ContainerSubject) else ""
        if view.resource is Resource.OOM_SCORE_ADJ and view.observed:
            scores.add_metric([*pod, name], int(view.observed))
        elif view.resource is Resource.CORE_SCHED_COOKIE and view.cookie:
            labels = [*pod, name, subject.id, view.desired, str(view.cookie)]
            cookies.add_metric(labels, 1)
    yield scores
    yield cookies


def of_cookies(node: str, changes: Mapping[CookieKey, int]) -> Iterator[Metric]:
    """Yield how often cookies changed. Untyped, since a counter's name would end in `_total`."""
    status = Metric(
        "koordlet_core_sched_cookie_manage_status",
        "Changes of core scheduling cookies, of the groups changed last.",
        "unknown",
    )
    for (group, outcome), count in tuple(changes.items()):
        labels = {"node": node, "core_sched_group": group, "status": outcome}
        status.add_sample(status.name, labels, count)
    yield status


def of_amounts(node: str, subjects: Iterable[Subject]) -> Iterator[Metric]:
    """Yield the batch and mid requests and limits of containers."""
    labels = [
        *("node", "resource", "unit", "pod_uid", "pod_name", "pod_namespace"),
        *("container_id", "container_name"),
    ]
    requests = GaugeMetricFamily(
        "koordlet_container_resource_requests",
        "Batch and mid resources that are requested.",
        labels=labels,
    )
    limits = GaugeMetricFamily(
        "koordlet_container_resource_limits", "Limits of batch and mid resources.", labels=labels
    )
    for subject in subjects:
        if not isinstance(subject, ContainerSubject):
            continue
        spec = subject.pod.spec(subject.name)
        if spec is None:
            continue
        pod = subject.pod
        whose = [pod.uid, pod.name, pod.namespace, subject.id, subject.name]
        for family, rows in (requests, _requests), (limits, _limits):
            for resource, unit, amount in rows(spec.amounts):
                if amount is not None:
                    family.add_metric([node, resource, unit, *whose], amount)
    yield requests
    yield limits


Row = tuple[str, str, int | None]
"""Resource, unit, amount."""


def _requests(amounts: Amounts) -> tuple[Row, ...]:
    return (
        (BATCH_CPU, "integer", amounts.batch_cpu_request_milli),
        (BATCH_MEMORY, "byte", amounts.batch_memory_request_bytes),
        (MID_CPU, "integer", amounts.mid_cpu_request_milli),
        (MID_MEMORY, "byte", amounts.mid_memory_request_bytes),
    )


def _limits(amounts: Amounts) -> tuple[Row, ...]:
    return (
        (BATCH_CPU, "integer", amounts.batch_cpu_limit_milli),
        (BATCH_MEMORY, "byte", amounts.batch_memory_limit_bytes),
        (MID_CPU, "integer", amounts.mid_cpu_limit_milli),
        (MID_MEMORY, "byte", amounts.mid_memory_limit_bytes),
    )
