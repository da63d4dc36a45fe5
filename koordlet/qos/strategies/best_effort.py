"""Which pods are best-effort, and what a CPU quota for all of them demands of each one."""

from __future__ import annotations

from typing import Final

from apis.qos import KubeQoS, QoSClass
from hooks.claim import Claim, Rank
from hooks.standing import Standing
from hooks.subject import Level, Pod
from koordlet.qos.strategy import Situation
from linux.resources import UNLIMITED, Resource

LIFTED_AHEAD_S: Final = 2.0
"""On cgroup v1, between the moment from which no container is created with a quota of its own and
the first common quota. Chosen: a runtime writes the quota of a reply within a second, busy nodes
included. v1 refuses one above the parent's, and the container would not start. Twice the value
delays the first common quota by two seconds more."""


def is_best_effort(pod: Pod) -> bool:
    """Return whether the pod's use is what suppression shapes, and so is not subtracted."""
    return pod.qos is QoSClass.BE or pod.kube_qos is KubeQoS.BESTEFFORT


def lifted_below(situation: Situation, policy: str, reason: str, source: str) -> Standing:
    """Return the claims that go with a quota of the besteffort directory.

    cgroup v1 refuses a group whose quota is above its parent's, and the runtime then fails to make
    the container. It accepts groups without a quota, and so pods and containers lose theirs. A
    bound instead would come too late where the directory's quota falls between the reply to the
    runtime and the container's creation. v2 accepts any quota, and the limits stay.
    """
    if situation.inputs.kernel.cgroup_version != 1:
        return Standing()
    claim = Claim(
        resource=Resource.CPU_CFS_QUOTA,
        value=UNLIMITED,
        policy=policy,
        reason=reason,
        source=source,
        rank=Rank.EMERGENCY,
    )
    levels = (Level.POD, Level.CONTAINER)
    return Standing(by_class={(level, KubeQoS.BESTEFFORT): (claim,) for level in levels})
