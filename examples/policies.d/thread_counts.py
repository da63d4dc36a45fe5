"""A site policy: numeric libraries start as many threads as the container may use CPUs.

OpenMP, MKL and OpenBLAS start one thread for each CPU of the host by default; under a
CFS quota these threads throttle one another. Pods that are labelled `example.com/sized-threads`
get OMP_NUM_THREADS from what they may use: the CPU limit, or a best-effort pod's batch limit.

The second function shows a bound instead of a value: pods labelled `example.com/disposable` are
killed early when memory runs out, unless they ask for an even higher OOM score themselves.

Copy this file to /etc/koordlet/policies.d and switch `sitePolicies.enabled` on.
"""

from __future__ import annotations

from collections.abc import Iterator

from hooks.claim import Claim, Op
from hooks.facts import NodeInputs
from hooks.site import site_policy, want
from hooks.subject import ContainerSubject
from linux.resources import Resource

SIZED_THREADS = "example.com/sized-threads"
DISPOSABLE = "example.com/disposable"


def usable_milli_cpu(subject: ContainerSubject) -> int | None:
    """Return what the container may use in milli-cores, None when nothing limits it."""
    spec = subject.pod.spec(subject.name)
    if spec is not None:
        return spec.amounts.batch_cpu_limit_milli or spec.amounts.cpu_limit_milli
    quota_us, period_us = subject.requested.cfs_quota_us, subject.requested.cfs_period_us
    if quota_us is None or quota_us <= 0:
        return None
    return quota_us * 1000 // (period_us or 100_000)


def container(node: NodeInputs, subject: ContainerSubject) -> Iterator[Claim]:
    labels = subject.pod.labels
    if labels.get(SIZED_THREADS) == "true":
        milli_cpu = usable_milli_cpu(subject)
        if milli_cpu:
            yield want(
                Resource.ENV,
                str(max(milli_cpu // 1000, 1)),
                key="OMP_NUM_THREADS",
                reason=f"as many threads as fit into {milli_cpu / 1000:g} CPUs",
                source=f"label {SIZED_THREADS}",
            )
    if labels.get(DISPOSABLE) == "true":
        yield want(
            Resource.OOM_SCORE_ADJ,
            900,
            op=Op.AT_LEAST,
            reason="may be killed before anything else",
            source=f"label {DISPOSABLE}",
        )


POLICY = site_policy(
    name="thread-counts",
    summary="OMP_NUM_THREADS by CPU limit, and an early OOM kill for disposable pods",
    container=container,
)
