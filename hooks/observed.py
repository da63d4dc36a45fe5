"""Sandboxes and containers as a runtime described them in one message.

Both transports and the sources of the daemon's state make these values: NRI events, CRI lists.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Requested, SandboxSubject


class ContainerState(IntEnum):
    """As the runtime tells it. UNKNOWN stands during creation, and for exited ones in 2.3+."""

    UNKNOWN = 0
    CREATED = 1
    PAUSED = 2
    RUNNING = 3
    STOPPED = 4


class Sandbox(msgspec.Struct, frozen=True):
    """A sandbox as one message described it.

    subject: its `pod` has labels and annotations as of RunPodSandbox; the runtime never refreshes
        them, and knows no container specifications. A handler that knows the pod better (kubelet,
        API server) replaces `subject.pod` by its own, found by uid.
    resources: kubelet's sums over the containers; all None where the runtime does not tell.
    pid: of the pause process; 0 before it runs and after it ended.
    """

    subject: SandboxSubject
    resources: Requested = NOTHING_REQUESTED
    pid: int = 0


class Container(msgspec.Struct, frozen=True):
    """A container as one message described it.

    subject.requested: what kubelet asks for *in this event*: at creation the request's values, at
        an update the values that the update gives (None: not given), else nothing.
    current: the values in the runtime's stored specification, which hold what plugins, this one
        included, set earlier. They are no base for another division or minimum.
    """

    subject: ContainerSubject
    sandbox_id: str
    current: Requested = NOTHING_REQUESTED
    state: ContainerState = ContainerState.UNKNOWN
    pid: int = 0
