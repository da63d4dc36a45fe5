"""What prod pods request and will probably not use, and what they will use at their peak.

Two predictions are made, and the more careful one counts: the smaller amount for what can be
reclaimed, the larger one for the peak. margin = (100 + safety margin percent) / 100.

By pod, over pods of koord-prod: peak = percentile x margin (p95 of CPU, p98 of memory).

    reclaimable = min(max(allocatable - sum of peaks, 0), sum of max(request - peak, 0))
    peak        = sum of peaks + requests of pods that cannot be predicted yet

By class:

    used        = (system + koord-prod + no class, each its percentile) x margin
    reclaimable = min(max(allocatable - used, 0), max(sum of requests - used, 0))
    peak        = used

Formulas and margins are upstream's: docs/facts/koordlet.md, "Prediction". These rules are ours:

- A pod that has ended or is being deleted counts in neither, whatever its age.
- A pod cannot be predicted while it is young, and also while its model has seen less than half of
  the cold-start time: after the loss of all checkpoints the model of an old pod knows nothing.
- A pod without a model or without current samples counts with its request, and the other pods and
  the other prediction are made all the same.
- A class without a model counts with the requests of its pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from apis.qos import PriorityClass
from hooks.amounts import cpu_request, memory_request, request_of_pod
from hooks.subject import Pod
from koordlet.prediction.models import SYSTEM, Models, Use, class_key, class_of

CPU_FRACTION: Final = 0.95
MEMORY_FRACTION: Final = 0.98
"""Upstream's percentiles: memory cannot be throttled, so more of its peaks count."""
_COUNTED: Final = (PriorityClass.PROD, PriorityClass.NONE)
_SEEN_FRACTION: Final = 0.5
"""Of the cold-start time that a model must have been trained. Chosen: half a day with upstream's
time, which holds either a working day's or a night's peak; at twice the value a pod would wait for
more than a day after every lost training."""


class Settings(msgspec.Struct, frozen=True):
    """cold_start_s: age below which a pod is not predicted. by_age_only: upstream's rule, which
    looks at the age alone. training_s: between two trainings."""

    safety_margin_percent: int = 10
    cold_start_s: float = 24 * 3600.0
    training_s: float = 60.0
    by_age_only: bool = False

    @property
    def least_samples(self) -> int:
        """How many trainings a pod's model needs."""
        if self.by_age_only:
            return 1
        return int(self.cold_start_s * _SEEN_FRACTION / self.training_s)


class Both(msgspec.Struct, frozen=True):
    """An amount of CPU and of memory."""

    cpu_milli: int = 0
    memory_bytes: int = 0

    def __add__(self, other: Both) -> Both:
        return Both(self.cpu_milli + other.cpu_milli, self.memory_bytes + other.memory_bytes)

    def less(self, other: Both) -> Both:
        """Return the difference, at least 0."""
        return Both(
            max(self.cpu_milli - other.cpu_milli, 0), max(self.memory_bytes - other.memory_bytes, 0)
        )

    def at_most(self, other: Both) -> Both:
        return Both(
            min(self.cpu_milli, other.cpu_milli), min(self.memory_bytes, other.memory_bytes)
        )

    def at_least(self, other: Both) -> Both:
        return Both(
            max(self.cpu_milli, other.cpu_milli), max(self.memory_bytes, other.memory_bytes)
        )

    def times(self, factor: float) -> Both:
        """Return the product, truncated to milli-cores and bytes."""
        return Both(int(self.cpu_milli * factor), int(self.memory_bytes * factor))


class Prediction(msgspec.Struct, frozen=True):
    """The result of one predictor."""

    reclaimable: Both
    peak: Both


class Predictions(msgspec.Struct, frozen=True):
    """Both predictions and the one that counts."""

    by_pod: Prediction
    by_class: Prediction

    @property
    def careful(self) -> Prediction:
        return Prediction(
            self.by_pod.reclaimable.at_most(self.by_class.reclaimable),
            self.by_pod.peak.at_least(self.by_class.peak),
        )


class PodOutlook(msgspec.Struct, frozen=True):
    """A pod that has not ended. peak: None where it cannot be predicted."""

    request: Both
    priority: PriorityClass
    peak: Both | None = None
    measured: bool = True


def peak_of(use: Use, margin: float) -> Both:
    """Return a percentile with the margin; both steps truncate."""
    return Both(int(use.cpu_cores * 1000), int(use.memory_bytes)).times(margin)


def by_pod(pods: Sequence[PodOutlook], allocatable: Both) -> Prediction:
    """Return the prediction from the pods' own models."""
    peaks = reclaimable = unpredicted = Both()
    for pod in pods:
        if pod.priority not in _COUNTED:
            continue
        if pod.peak is None:
            unpredicted += pod.request
        else:
            peaks += pod.peak
            reclaimable += pod.request.less(pod.peak)
    return Prediction(allocatable.less(peaks).at_most(reclaimable), peaks + unpredicted)


def by_class(
    pods: Sequence[PodOutlook], classes: Mapping[str, Use], allocatable: Both, margin: float
) -> Prediction:
    """Return the prediction from the models of the system and of the classes.

    classes: key -> percentiles, for the models that exist.
    """
    used = requests = without_model = Both()
    if SYSTEM in classes:
        used += peak_of(classes[SYSTEM], 1.0)
    for priority in _COUNTED:
        known = classes.get(class_key(priority))
        if known is not None:
            used += peak_of(known, 1.0)
        for pod in pods:
            if pod.priority is not priority:
                continue
            if known is None:
                without_model += pod.request
            if pod.measured:
                requests += pod.request
    used = used.times(margin) + without_model
    return Prediction(allocatable.less(used).at_most(requests.less(used)), used)


def predict(
    models: Models,
    pods: Sequence[tuple[Pod, bool]],
    *,
    allocatable: Both,
    settings: Settings,
    wall_s: float,
    measured: frozenset[str] | set[str],
) -> Predictions:
    """Return both predictions for a node.

    pods: each with whether it is being deleted. measured: uids with samples in the report's window.
    wall_s: seconds since the epoch.
    """
    margin = (100 + settings.safety_margin_percent) / 100
    alive = [(pod, class_of(pod)) for pod, terminating in pods if not terminating and not pod.ended]
    peaks = models.peaks(
        [pod.uid for pod, priority in alive if priority in _COUNTED],
        cpu_fraction=CPU_FRACTION,
        memory_fraction=MEMORY_FRACTION,
    )
    outlooks = []
    for pod, priority in alive:
        use = peaks.get(pod.uid)
        cold = (
            (pod.created_at > 0 and wall_s - pod.created_at <= settings.cold_start_s)
            or pod.uid not in measured
            or models.samples_of(pod.uid) < settings.least_samples
        )
        outlooks.append(
            PodOutlook(
                request=request(pod),
                priority=priority,
                peak=None if use is None or cold else peak_of(use, margin),
                measured=pod.uid in measured,
            )
        )
    classes = models.peaks(
        (SYSTEM, *(class_key(priority) for priority in _COUNTED)),
        cpu_fraction=CPU_FRACTION,
        memory_fraction=MEMORY_FRACTION,
    )
    return Predictions(
        by_pod(outlooks, allocatable), by_class(outlooks, classes, allocatable, margin)
    )


def request(pod: Pod) -> Both:
    """Return what a pod requests, as Kubernetes counts it. An absent request equals the limit."""
    return Both(request_of_pod(pod, cpu_request), request_of_pod(pod, memory_request))
