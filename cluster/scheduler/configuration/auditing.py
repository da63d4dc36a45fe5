"""The flags of the workload auditor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from cluster.flags import FlagError, Values

PRIORITY: Final = "priority"
"""The first label of the auditor's metrics: the priority class of the workload."""
EVENT_TYPE: Final = "event_type"
OUTCOME: Final = "outcome"

_FLAG: Final = "workload-auditor-metric-labels"
_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
"""Prometheus': names that begin with two underscores are its own."""
_TAKEN: Final = frozenset({PRIORITY, EVENT_TYPE, OUTCOME, "le"})


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """A label of the auditor's metrics, and the label of a pod that its value is taken from."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class AuditorSettings:
    """labels: of the metrics, beside the priority class. The others are limits, in seconds or
    attempts; what exceeds one is logged.

    victim_reschedule_s: from the end of all victims to the next result for the workload.
    victim_deletion_s: from a preemption to the end of its victims.
    victim_deleting_retries: attempts of the workload in that time.
    event_interval_s: between two scheduling events of a workload.
    """

    labels: tuple[MetricLabel, ...] = ()
    victim_reschedule_s: float = 10.0
    victim_deletion_s: float = 30.0
    victim_deleting_retries: int = 3
    event_interval_s: float = 300.0


def read_auditor(values: Values) -> AuditorSettings | None:
    """Return what the flags say; None while the auditor is off. Raises FlagError.

    Of labels that no metric could have, a start with the auditor off says so too.
    """
    settings = AuditorSettings(
        labels=_labels(values.text(_FLAG)),
        victim_reschedule_s=values.seconds("workload-auditor-victim-reschedule-duration"),
        victim_deletion_s=values.seconds("workload-auditor-victim-deletion-duration"),
        victim_deleting_retries=values.whole("workload-auditor-victim-deleting-retries"),
        event_interval_s=values.seconds("workload-auditor-scheduling-event-interval"),
    )
    return settings if values.on("enable-workload-auditor") else None


def _labels(text: str) -> tuple[MetricLabel, ...]:
    """Return the pairs of `metricLabel=podLabelKey,...`. As upstream, it leaves out what is no
    pair; a name that Prometheus does not take, which ends upstream's start, is refused."""
    found: dict[str, MetricLabel] = {}
    for pair in text.split(","):
        name, _, key = (part.strip() for part in pair.partition("="))
        if not name or not key:
            continue
        if not _NAME.fullmatch(name):
            raise FlagError(f"--{_FLAG}: {name!r} is no name of a label in Prometheus")
        if name in found or name in _TAKEN:
            raise FlagError(f"--{_FLAG}: the metrics have a label {name} already")
        found[name] = MetricLabel(name, key)
    return tuple(found.values())
