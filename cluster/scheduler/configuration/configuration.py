"""The configuration of a scheduler, complete and checked: what `reading` makes of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cluster.scheduler.configuration.arguments import NotNegative64, Percent
from cluster.scheduler.configuration.extenders import Extender
from cluster.scheduler.configuration.profiles import Profile
from cluster.scheduler.configuration.strict import Seconds, Section

DEFAULT_SCHEDULER_NAME: Final = "default-scheduler"
"""Kubernetes' name of the scheduler of pods that name none."""
_JITTER: Final = 1.2
"""client-go waits up to 1.2 times the retry period between two attempts to renew a lease."""


class ClientConnection(Section, frozen=True):
    """How the API server is reached. kubeconfig: "" for the pod's service account.

    qps: requests per second over time; below 0 no limit. burst: requests at once.
    """

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: Annotated[float, Meta(ge=-1e9, le=1e9)] = 50.0
    burst: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 100


class LeaderElection(Section, frozen=True):
    """The lease that one replica holds."""

    leader_elect: bool = True
    lease_duration: Seconds = Seconds(15)
    renew_deadline: Seconds = Seconds(10)
    retry_period: Seconds = Seconds(2)
    resource_lock: str = "leases"
    resource_name: str = "kube-scheduler"
    resource_namespace: str = "kube-system"


def lease_problems(lease: LeaderElection) -> Iterator[tuple[str, object, str]]:
    """Yield field, value and problem of what cannot be used; the bounds are client-go's.

    Nothing is checked where there is no election.
    """
    if not lease.leader_elect:
        return
    if lease.resource_lock != "leases":
        yield "resourceLock", lease.resource_lock, "expected leases, the only kind of lock"
    if lease.lease_duration <= lease.renew_deadline:
        yield (
            "leaseDuration",
            f"{lease.lease_duration:g}s",
            f"must be greater than renewDeadline, which is {lease.renew_deadline:g}s",
        )
    if lease.renew_deadline <= lease.retry_period * _JITTER:
        yield (
            "renewDeadline",
            f"{lease.renew_deadline:g}s",
            f"must be greater than {_JITTER} times retryPeriod, which is {lease.retry_period:g}s",
        )


class SchedulerConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One process's configuration.

    parallelism, percentage_of_nodes_to_score: kept to be shown, without effect: all nodes are
    evaluated in every cycle. notices: what the file says without effect here, a sentence each, for
    the log. gates: the feature gates of the command line, by name; a gate that is missing has its
    default.
    """

    client_connection: ClientConnection = ClientConnection()
    leader_election: LeaderElection = LeaderElection()
    parallelism: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 16
    percentage_of_nodes_to_score: Percent = 0
    pod_initial_backoff_seconds: NotNegative64 = 1
    pod_max_backoff_seconds: NotNegative64 = 10
    enable_profiling: bool = True
    enable_contention_profiling: bool = True
    delay_cache_until_active: bool = False
    profiles: tuple[Profile, ...]
    extenders: tuple[Extender, ...] = ()
    notices: tuple[str, ...] = ()
    gates: Mapping[str, bool] = msgspec.field(default_factory=dict)
