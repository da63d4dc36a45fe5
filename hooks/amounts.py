"""From amounts in a pod's specification to what cgroup files hold, as kubelet counts and converts.

One place for the sums over a pod's containers: containers that run at the same time add up, an init
container counts only while it runs, overhead comes on top. Policies use these sums for their
claims, and kubelet's own requests to the runtime follow from the same rule: docs/facts/kernel.md,
"Shares, weights and quotas".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hooks.subject import (
    NOTHING_REQUESTED,
    Amounts,
    ContainerKind,
    ContainerSpec,
    Pod,
    Requested,
)
from linux.cgroup_files import DEFAULT_PERIOD_US, MIN_QUOTA_US
from linux.resources import UNLIMITED
from linux.weights import MAX_SHARES, MIN_SHARES

Pick = Callable[[Amounts], int | None]
"""Picks one amount, for example `lambda amounts: amounts.batch_cpu_limit_milli`."""


def cpu_request(amounts: Amounts) -> int | None:
    """Pick the CPU request in milli-cores; an absent one equals the limit, as Kubernetes has it."""
    if amounts.cpu_request_milli is None:
        return amounts.cpu_limit_milli
    return amounts.cpu_request_milli


def memory_request(amounts: Amounts) -> int | None:
    """Pick the memory request in bytes by the same rule."""
    if amounts.memory_request_bytes is None:
        return amounts.memory_limit_bytes
    return amounts.memory_request_bytes


def milli_to_shares(milli: int) -> int:
    """Return cpu.shares for milli-cores: kubelet's 1024 a core, within 2..262144."""
    return min(max(milli * 1024 // 1000, MIN_SHARES), MAX_SHARES)


def milli_to_quota_us(milli: int) -> int:
    """Return the CFS quota per 100 ms; 0 and less is UNLIMITED, the smallest is 1000 µs.

    Effectors scale a quota to the period that a group has.
    """
    if milli <= 0:
        return UNLIMITED
    return max(milli * DEFAULT_PERIOD_US // 1000, MIN_QUOTA_US)


def sum_of_requests(specs: Iterable[ContainerSpec], pick: Pick, overhead: int | None) -> int:
    """Return the pod's request: the larger of the running sum and the peak while initialising.

    A missing or negative request counts 0.
    """
    return _peak(specs, lambda amounts: max(pick(amounts) or 0, 0)) + max(overhead or 0, 0)


def sum_of_limits(specs: Iterable[ContainerSpec], pick: Pick, overhead: int | None) -> int:
    """Return the pod's limit by the same rule; UNLIMITED when a container has no limit."""
    known = tuple(specs)
    if not known or any((pick(spec.amounts) or 0) <= 0 for spec in known):
        return UNLIMITED
    return _peak(known, lambda amounts: pick(amounts) or 0) + max(overhead or 0, 0)


def _peak(specs: Iterable[ContainerSpec], amount: Callable[[Amounts], int]) -> int:
    running = sidecars = initialising = 0
    for spec in specs:
        count = amount(spec.amounts)
        if spec.kind is ContainerKind.REGULAR:
            running += count
        elif spec.kind is ContainerKind.SIDECAR:
            sidecars += count
            initialising = max(initialising, sidecars)
        else:
            # An ordinary init container runs beside the sidecars that were started before it.
            initialising = max(initialising, sidecars + count)
    return max(running + sidecars, initialising)


def regular_only(specs: Iterable[ContainerSpec]) -> tuple[ContainerSpec, ...]:
    """Return the containers that upstream sums: those of `spec.containers`."""
    return tuple(spec for spec in specs if spec.kind is ContainerKind.REGULAR)


def request_of_pod(pod: Pod, request: Pick) -> int:
    """Return the pod's request: its own (`spec.resources`) if it has one, else the containers' sum.

    Overhead is added to either.
    """
    whole, overhead = request(pod.resources) or 0, request(pod.overhead)
    if whole > 0:
        return whole + max(overhead or 0, 0)
    return sum_of_requests(pod.specs, request, overhead)


def limit_of_pod(pod: Pod, limit: Pick, request: Pick) -> int:
    """Return the pod's limit by the same rule, UNLIMITED without one.

    request: picks the overhead's amount, which has no separate limit.
    """
    whole, overhead = limit(pod.resources) or 0, request(pod.overhead)
    if whole > 0:
        return whole + max(overhead or 0, 0)
    return sum_of_limits(pod.specs, limit, overhead)


def requested_of_container(amounts: Amounts, pod_level: Amounts) -> Requested:
    """Return what kubelet requests from the runtime for a container.

    pod_level: the pod's own resources. A container without a limit gets the pod's.
    """
    limit_milli = amounts.cpu_limit_milli or pod_level.cpu_limit_milli or 0
    asked_milli = amounts.cpu_request_milli
    return Requested(
        # The API server's defaulting: an absent request equals the limit.
        cpu_shares=milli_to_shares(limit_milli if asked_milli is None else asked_milli),
        cfs_quota_us=milli_to_quota_us(limit_milli),
        memory_limit_bytes=(
            amounts.memory_limit_bytes or pod_level.memory_limit_bytes or UNLIMITED
        ),
    )


def requested_of_pod(pod: Pod) -> Requested:
    """Return what kubelet sets on the pod's directory; nothing while the specs are unknown."""
    if not pod.specs:
        return NOTHING_REQUESTED
    return Requested(
        cpu_shares=milli_to_shares(request_of_pod(pod, cpu_request)),
        cfs_quota_us=milli_to_quota_us(limit_of_pod(pod, _cpu_limit, cpu_request)),
        memory_limit_bytes=limit_of_pod(pod, _memory_limit, memory_request),
    )


def _cpu_limit(amounts: Amounts) -> int | None:
    return amounts.cpu_limit_milli


def _memory_limit(amounts: Amounts) -> int | None:
    return amounts.memory_limit_bytes
