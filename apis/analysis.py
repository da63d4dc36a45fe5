"""Recommendation: resources that an analysis suggests for a workload. Source: api.md section 14."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import REQUIRED, LabelSelector, StatusCondition, Time
from apis.quantity import ResourceList


class CrossVersionObjectReference(Wire, frozen=True):
    kind: str
    name: str
    api_version: str = ""


class RecommendationTarget(Wire, frozen=True):
    type: str
    workload: CrossVersionObjectReference | None = None
    pod_selector: LabelSelector | None = None


class RecommendationSpec(Wire, frozen=True):
    target: Annotated[RecommendationTarget | None, Meta(extra=REQUIRED)] = None


class RecommendedContainerStatus(Wire, frozen=True):
    container_name: str = ""
    resources: ResourceList = field(default_factory=dict)


class RecommendedPodStatus(Wire, frozen=True):
    container_statuses: tuple[RecommendedContainerStatus, ...] = ()


class RecommendationStatus(Wire, frozen=True):
    pod_status: RecommendedPodStatus | None = None
    update_time: Time | None = None
    conditions: tuple[StatusCondition, ...] = ()


class Recommendation(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: RecommendationSpec = RecommendationSpec()
    status: RecommendationStatus = RecommendationStatus()
