"""Elastic quotas, their profiles and pod groups."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, json_decoder
from apis.meta import REQUIRED, Int32, LabelSelector, Time
from apis.quantity import ResourceList


class ElasticQuotaSpec(Wire, frozen=True):
    """Bounds of a quota.

    min: Amounts that the quota is guaranteed, by resource name.
    max: Amounts that the quota may use at most, by resource name.
    """

    min: ResourceList = field(default_factory=dict)
    max: ResourceList = field(default_factory=dict)


class ElasticQuotaStatus(Wire, frozen=True):
    """State of a quota.

    used: Amounts that the quota's pods request, by resource name.
    """

    used: ResourceList = field(default_factory=dict)


class ElasticQuota(Wire, frozen=True):
    """A share of the cluster's resources, in a tree of quotas. Names are unique in the cluster.

    spec: Bounds of the quota.
    status: State of the quota.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ElasticQuotaSpec = ElasticQuotaSpec()
    status: ElasticQuotaStatus = ElasticQuotaStatus()


class PodGroupSpec(Wire, frozen=True):
    """What the pods of a group need to start.

    min_member: Number of pods that must be schedulable together.
    min_resources: Amounts that the group needs to start, by resource name.
    schedule_timeout_seconds: Seconds that scheduled pods wait for the others.
    """

    min_member: Int32 = 0
    min_resources: ResourceList = field(default_factory=dict)
    schedule_timeout_seconds: Int32 | None = None


class PodGroupStatus(Wire, frozen=True):
    """State of a pod group.

    phase: Pending, PreScheduling, Scheduling, Scheduled, Running, Unknown, Finished or Failed.
    occupied_by: Owners of the pods, separated by commas.
    scheduled: Number of pods that are bound to nodes.
    running: Number of pods that run.
    succeeded: Number of pods that ended with success.
    failed: Number of pods that failed.
    schedule_start_time: When scheduling of the group began.
    """

    phase: str = ""
    occupied_by: str = ""
    scheduled: Int32 = 0
    running: Int32 = 0
    succeeded: Int32 = 0
    failed: Int32 = 0
    schedule_start_time: Time | None = None


class PodGroup(Wire, frozen=True):
    """Pods that are scheduled together or not at all.

    spec: What the pods of the group need to start.
    status: State of the group.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()


class ElasticQuotaProfileSpec(Wire, frozen=True):
    """Which quota is made, and from which nodes.

    quota_name: Name of the quota that is kept in the profile's namespace.
    quota_labels: Labels of the quota.
    resource_ratio: Share of the nodes' resources that the quota gets, above 0 and up to 1; 1 if not
        set.
    node_selector: Nodes whose allocatable resources are added up.
    """

    quota_name: Annotated[str, Meta(extra=REQUIRED)] = ""
    quota_labels: dict[str, str] = field(default_factory=dict)
    resource_ratio: str | None = None
    node_selector: Annotated[LabelSelector | None, Meta(extra=REQUIRED)] = None


class ElasticQuotaProfileStatus(Wire, frozen=True):
    """Reserved; it has no members."""


class ElasticQuotaProfile(Wire, frozen=True):
    """Keeps the root quota of a quota tree at the resources of a set of nodes.

    spec: Which quota is made, and from which nodes.
    status: Reserved; it has no members.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ElasticQuotaProfileSpec = ElasticQuotaProfileSpec()
    status: ElasticQuotaProfileStatus = ElasticQuotaProfileStatus()


decode_elastic_quota: Final = json_decoder(ElasticQuota)
