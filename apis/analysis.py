"""Recommendation: resources that an analysis suggests for a workload."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import REQUIRED, LabelSelector, StatusCondition, Time
from apis.quantity import ResourceList


class CrossVersionObjectReference(Wire, frozen=True):
    """Refers to a workload in the same namespace.

    kind: Kind of the workload.
    name: Name of the workload.
    api_version: API version of the workload.
    """

    kind: str
    name: str
    api_version: str = ""


class RecommendationTarget(Wire, frozen=True):
    """What is analysed.

    type: workload or podSelector.
    workload: The workload, for the type workload.
    pod_selector: Labels of the pods, for the type podSelector.
    """

    type: str
    workload: CrossVersionObjectReference | None = None
    pod_selector: LabelSelector | None = None


class RecommendationSpec(Wire, frozen=True):
    """What is analysed.

    target: The workload or the pods.
    """

    target: Annotated[RecommendationTarget | None, Meta(extra=REQUIRED)] = None


class RecommendedContainerStatus(Wire, frozen=True):
    """Resources recommended for one container.

    container_name: Name of the container.
    resources: Recommended requests, by resource name.
    """

    container_name: str = ""
    resources: ResourceList = field(default_factory=dict)


class RecommendedPodStatus(Wire, frozen=True):
    """Resources recommended for a pod.

    container_statuses: Resources recommended for each container.
    """

    container_statuses: tuple[RecommendedContainerStatus, ...] = ()


class RecommendationStatus(Wire, frozen=True):
    """Result of the analysis.

    pod_status: Resources recommended for each pod of the target.
    update_time: When the recommendation last changed.
    conditions: What is known about the analysis, such as LowConfidence or NoObjectsMatched.
    """

    pod_status: RecommendedPodStatus | None = None
    update_time: Time | None = None
    conditions: tuple[StatusCondition, ...] = ()


class Recommendation(Wire, frozen=True):
    """Resource requests that an analysis of past usage recommends for a workload.

    spec: What is analysed.
    status: Result of the analysis.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: RecommendationSpec = RecommendationSpec()
    status: RecommendationStatus = RecommendationStatus()
