"""Elastic quotas, their profiles and pod groups. Sources: api.md sections 9, 10, 12 and 17.5."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, json_decoder
from apis.meta import REQUIRED, Int32, LabelSelector, Time
from apis.quantity import ResourceList


class ElasticQuotaSpec(Wire, frozen=True):
    min: ResourceList = field(default_factory=dict)
    max: ResourceList = field(default_factory=dict)


class ElasticQuotaStatus(Wire, frozen=True):
    used: ResourceList = field(default_factory=dict)


class ElasticQuota(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ElasticQuotaSpec = ElasticQuotaSpec()
    status: ElasticQuotaStatus = ElasticQuotaStatus()


class PodGroupSpec(Wire, frozen=True):
    min_member: Int32 = 0
    min_resources: ResourceList = field(default_factory=dict)
    schedule_timeout_seconds: Int32 | None = None


class PodGroupStatus(Wire, frozen=True):
    phase: str = ""
    occupied_by: str = ""
    scheduled: Int32 = 0
    running: Int32 = 0
    succeeded: Int32 = 0
    failed: Int32 = 0
    schedule_start_time: Time | None = None


class PodGroup(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()


class ElasticQuotaProfileSpec(Wire, frozen=True):
    quota_name: Annotated[str, Meta(extra=REQUIRED)] = ""
    quota_labels: dict[str, str] = field(default_factory=dict)
    resource_ratio: str | None = None
    node_selector: Annotated[LabelSelector | None, Meta(extra=REQUIRED)] = None


class ElasticQuotaProfileStatus(Wire, frozen=True):
    """Always empty."""


class ElasticQuotaProfile(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ElasticQuotaProfileSpec = ElasticQuotaProfileSpec()
    status: ElasticQuotaProfileStatus = ElasticQuotaProfileStatus()


decode_elastic_quota: Final = json_decoder(ElasticQuota)
