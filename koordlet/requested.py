"""What kubelet asked the runtime for, as the canonical value of a resource."""

from __future__ import annotations

from hooks.subject import ContainerSubject, PodSubject, Requested, Subject
from linux.cgroup_files import DEFAULT_PERIOD_US
from linux.resources import UNLIMITED, Resource, Value


def requested_value(subject: Subject, resource: Resource) -> Value | None:
    """Return what kubelet asked for, canonical: a quota per 100 ms."""
    if not isinstance(subject, ContainerSubject | PodSubject):
        return None
    return asked_for(subject.requested, resource)


def asked_for(asked: Requested, resource: Resource) -> Value | None:
    """Return a request's value of one resource, canonical."""
    match resource:
        case Resource.CPU_SHARES:
            return asked.cpu_shares
        case Resource.CPU_CFS_QUOTA:
            quota, period = asked.cfs_quota_us, asked.cfs_period_us
            if quota is None or quota == UNLIMITED or not period or period == DEFAULT_PERIOD_US:
                return quota
            return quota * DEFAULT_PERIOD_US // period
        case Resource.MEMORY_LIMIT:
            return asked.memory_limit_bytes
        case Resource.CPUSET_CPUS:
            return asked.cpus or None
        case Resource.CPUSET_MEMS:
            return asked.mems or None
        case Resource.OOM_SCORE_ADJ:
            return asked.oom_score_adj
        case _:
            return None
