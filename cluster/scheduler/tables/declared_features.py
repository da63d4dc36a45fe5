"""Features of kubelet that pods need and nodes declare, a bit for each.

Those of kube-scheduler 1.36 that a pod may need to be placed; nodes declare others, which only
matter when a pod is changed. docs/facts/scheduler.md, "Declared features".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from apis.scheduling_pod import SchedulingPodSpec

_RESTART_ALL: Final = 1 << 0
_USERS_IN_HOST_NETWORK: Final = 1 << 1

_BITS: Final = {
    "RestartAllContainersOnContainerExits": _RESTART_ALL,
    "UserNamespacesHostNetworkSupport": _USERS_IN_HOST_NETWORK,
}


def declared(names: Iterable[str]) -> int:
    """Return the bits of the features that a node declares, by their names."""
    bits = 0
    for name in names:
        bits |= _BITS.get(name, 0)
    return bits


def needed(spec: SchedulingPodSpec) -> int:
    """Return the bits of the features that a pod needs."""
    bits = 0
    for container in (*spec.containers, *spec.init_containers):
        if any(rule.action == "RestartAllContainers" for rule in container.restart_policy_rules):
            bits |= _RESTART_ALL
    if spec.host_network and spec.host_users is False:
        bits |= _USERS_IN_HOST_NETWORK
    return bits
