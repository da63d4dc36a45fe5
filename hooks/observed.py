"""Sandboxes and containers as a runtime described them in one message.

Both transports and the sources of the daemon's state make these values: NRI events, CRI lists.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Requested, SandboxSubject


class ContainerState(IntEnum):
    """NRI's states. UNKNOWN: during creation, and from containerd 2.3 on after the exit as well."""

    UNKNOWN = 0
    CREATED = 1
    PAUSED = 2
    RUNNING = 3
    STOPPED = 4


class Sandbox(msgspec.Struct, frozen=True):
    """A sandbox as one message described it.

    subject: its `pod` has labels and annotations as of RunPodSandbox; the runtime never refreshes
        them, and has no container specifications. A handler with a better source of the pod
        (kubelet, API server) replaces `subject.pod` by that source's pod of the same UID.
    resources: kubelet's sums over the containers; all None where the runtime does not report them.
    pid: of the pause process; 0 before it runs and after it ended.
    """

    subject: SandboxSubject
    resources: Requested = NOTHING_REQUESTED
    pid: int = 0


class Container(msgspec.Struct, frozen=True):
    """A container as one message described it.

    subject.requested: what kubelet requests *in this event*: at creation and update the values of
        the request (None: not in it), in other events nothing.
    current: the values in the runtime's stored specification, which hold what plugins, this one
        included, set earlier. They must not be divided or bounded again.
    """

    subject: ContainerSubject
    sandbox_id: str
    current: Requested = NOTHING_REQUESTED
    state: ContainerState = ContainerState.UNKNOWN
    pid: int = 0
