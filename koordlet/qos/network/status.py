"""What network QoS wants and what is in force, as of its last look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from apis.nodeslo import NodeSLOSpec
from hooks.state import State
from koordlet.qos.network.classes import NetworkClasses, PodOnNetwork
from linux.htb import HtbClass
from linux.packet_classes import Member

NAME: Final = "network-qos"
"""Of this part of koordlet, in explanations, events and the audit log."""


class NetworkQosStatus(msgspec.Struct, frozen=True):
    """The last look.

    on: gate and NodeSLO ask for it. why: what asks, or does not. device: the shaped one.
    device_why: why this one. slo: the one in force. pods: those that were sorted. wanted: None
    until it is known. state: of the device's queueing discipline; `APPLIED` also when the kernel
    refused a class or a member, which `problems` names then. classes, members: what the kernel has.
    problems: what is not in force, and why. checked_at: by a monotonic clock. writes, failures:
    since the start. took_s: the last comparison with the kernel.
    """

    on: bool = False
    why: str = ""
    device: str = ""
    device_why: str = ""
    slo: NodeSLOSpec | None = None
    pods: tuple[PodOnNetwork, ...] = ()
    wanted: NetworkClasses | None = None
    state: State = State.PENDING
    classes: Mapping[int, HtbClass] = {}
    members: Mapping[Member, int] = {}
    problems: tuple[str, ...] = ()
    checked_at: float | None = None
    writes: int = 0
    failures: int = 0
    took_s: float = 0.0
