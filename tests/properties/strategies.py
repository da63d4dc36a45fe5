"""What the strategies of a random life claim: the shapes of CPU suppression, CPU burst and memory.

As real ones do, they look at the pods of the moment; a later pod has the claims of its class only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.standing import Standing
from hooks.subject import Level
from linux.resources import Resource, Value

if TYPE_CHECKING:
    from tests.properties.node import OperatedNode

BE, LS = KubeQoS.BESTEFFORT, KubeQoS.BURSTABLE
_DIRECTORY: Final = f"kubeqos/{BE}"
_MIB: Final = 1 << 20


def _claim(
    strategy: str, resource: Resource, value: Value, number: int, *, op: Op = Op.SET
) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=strategy,
        reason=f"measurement {number}",
        source="a random life",
        op=op,
        rank=Rank.EMERGENCY,
    )


def nothing(node: OperatedNode, number: int) -> Standing:
    return Standing()


def quota_of_best_effort(quota_us: int) -> Callable[[OperatedNode, int], Standing]:
    """The besteffort directory's quota, and no more for any of its containers: v1 would refuse a
    new container with a larger one."""

    def standing(node: OperatedNode, number: int) -> Standing:
        whole = _claim("suppress", Resource.CPU_CFS_QUOTA, quota_us, number)
        most = _claim("suppress", Resource.CPU_CFS_QUOTA, quota_us, number, op=Op.WITHIN)
        return Standing({_DIRECTORY: (whole,)}, {(Level.CONTAINER, BE): (most,)})

    return standing


def cpus_of_best_effort(*cpus: int) -> Callable[[OperatedNode, int], Standing]:
    """The CPUs of the besteffort directory and of all below.

    On v1 a new container inherits its pod's, so only those that exist are named.
    """

    def standing(node: OperatedNode, number: int) -> Standing:
        possible = frozenset(cpus) - node.cpus.offline - node.cpus.lost
        if not possible or any(pod.cpus for pod in node.pods if pod.kind.kube_qos == BE):
            return Standing()
        within = (_claim("suppress", Resource.CPUSET_CPUS, CpuSet(possible), number, op=Op.WITHIN),)
        by_class = {(Level.POD, BE): within, (Level.SANDBOX, BE): within}
        by_subject = {_DIRECTORY: within}
        if node.profile.cgroup == 2:
            by_class[Level.CONTAINER, BE] = within
        else:
            by_subject |= {
                f"container/{container.here.id}": within
                for pod in node.pods
                for container in pod.containers
                if pod.kind.kube_qos == BE
            }
        return Standing(by_subject, by_class)

    return standing


def burst(quota_us: int) -> Callable[[OperatedNode, int], Standing]:
    """At least this quota for Burstable pods that have one, and for their containers."""

    def standing(node: OperatedNode, number: int) -> Standing:
        least = (_claim("burst", Resource.CPU_CFS_QUOTA, quota_us, number, op=Op.AT_LEAST),)
        return Standing(by_class={(Level.POD, LS): least, (Level.CONTAINER, LS): least})

    return standing


def memory_high(mib: int) -> Callable[[OperatedNode, int], Standing]:
    """memory.high of single containers, where the kernel has it."""

    def standing(node: OperatedNode, number: int) -> Standing:
        if Resource.MEMORY_HIGH not in node.inputs.kernel.supported:
            return Standing()
        high = (_claim("memory", Resource.MEMORY_HIGH, mib * _MIB, number),)
        return Standing(
            {
                f"container/{container.here.id}": high
                for pod in node.pods
                for container in pod.containers[:1]
            }
        )

    return standing


WANTED: Final[Mapping[str, tuple[str, Callable[[OperatedNode, int], Standing]]]] = {
    "suppress nothing": ("suppress", nothing),
    "suppress to 0.2 cores": ("suppress", quota_of_best_effort(20_000)),
    "suppress to 1.5 cores": ("suppress", quota_of_best_effort(150_000)),
    "suppress to CPUs 0-1": ("suppress", cpus_of_best_effort(0, 1)),
    "suppress to CPUs 1-3": ("suppress", cpus_of_best_effort(1, 2, 3)),
    "burst nothing": ("burst", nothing),
    "burst to 3 cores": ("burst", burst(300_000)),
    "burst to 2.5 cores": ("burst", burst(250_000)),
    "memory nothing": ("memory", nothing),
    "memory of 512 MiB": ("memory", memory_high(512)),
}
"""By name: the strategy, and what it claims then."""
