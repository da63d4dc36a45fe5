"""Kubelet's request to the runtime, as the canonical value of a resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Final

from apis.cpuset import CpuSet
from hooks.subject import ContainerSubject, PodSubject, Requested, Subject
from linux.cgroup_files import quota_per_100ms
from linux.resources import UNLIMITED, Resource, Value


def requested_value(subject: Subject, resource: Resource) -> Value | None:
    """Return what kubelet requested of one resource, None where it requested nothing."""
    if not isinstance(subject, ContainerSubject | PodSubject):
        return None
    return value_in_request(subject.requested, resource)


def value_in_request(requested: Requested, resource: Resource) -> Value | None:
    """Return a request's value of one resource; an empty set requests nothing."""
    value = _VALUES.get(resource)
    return None if value is None else value(requested)


def overlay(upper: Requested, lower: Requested) -> Requested:
    """Return `lower` with every field that `upper` has set replaced."""
    return Requested(
        *(
            getattr(lower, name) if (value := getattr(upper, name)) is None else value
            for name in Requested.__struct_fields__
        )
    )


def requested_of(
    *,
    shares: int | None,
    quota_us: int | None,
    period_us: int | None,
    limit_bytes: int | None,
    cpus: str,
    mems: str,
    oom_score_adj: int | None,
) -> Requested:
    """Return the request of a runtime's message: 0 and "" are not set, a negative limit is none.

    The OOM score is kept as it is, since 0 is a score.
    """
    return Requested(
        cpu_shares=shares or None,
        cfs_quota_us=max(quota_us, UNLIMITED) if quota_us else None,
        cfs_period_us=period_us or None,
        memory_limit_bytes=max(limit_bytes, UNLIMITED) if limit_bytes else None,
        cpus=cpu_set(cpus) if cpus else None,
        mems=cpu_set(mems) if mems else None,
        oom_score_adj=oom_score_adj,
    )


def cpu_set(text: str) -> CpuSet | None:
    """Return the set that a kernel list names; None for the empty list and for no list at all."""
    try:
        return CpuSet.parse(text) or None
    except ValueError:
        return None


def _quota(requested: Requested) -> int | None:
    """Return the quota per 100 ms; kubelet may use another period."""
    if requested.cfs_quota_us is None:
        return None
    return quota_per_100ms(requested.cfs_quota_us, requested.cfs_period_us or 0)


_VALUES: Final[Mapping[Resource, Callable[[Requested], Value | None]]] = {
    Resource.CPU_SHARES: attrgetter("cpu_shares"),
    Resource.CPU_CFS_QUOTA: _quota,
    Resource.CPU_CFS_PERIOD: attrgetter("cfs_period_us"),
    Resource.MEMORY_LIMIT: attrgetter("memory_limit_bytes"),
    Resource.CPUSET_CPUS: lambda requested: requested.cpus or None,
    Resource.CPUSET_MEMS: lambda requested: requested.mems or None,
    Resource.OOM_SCORE_ADJ: attrgetter("oom_score_adj"),
}
