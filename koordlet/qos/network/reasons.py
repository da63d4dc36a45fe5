"""Why a traffic class has its rates, and why a pod is in its class. Pure.

Rates and classes themselves come from `network_classes`; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from apis.errors import InputError
from apis.keys import ANNOTATION_NETWORK_QOS, LABEL_QOS_CLASS
from apis.nodeslo import NetworkQOS, NodeSLOSpec
from apis.qos import QoSClass
from koordlet.qos.network.classes import (
    BE,
    LS,
    SHARED,
    SYSTEM,
    PodOnNetwork,
    by_age,
    packet_keys,
    pod_limit,
    shared_class,
)
from linux.packet_classes import Member

_STRATEGY: Final = "NodeSLO spec.resourceQOSStrategy"
_TOTAL: Final = "NodeSLO spec.systemStrategy.totalNetworkBandwidth"
_CLASS: Final = {LS: "lsClass", BE: "beClass"}


class Reason(msgspec.Struct, frozen=True):
    """text: short, for a person. source: the input field that it came from."""

    text: str
    source: str


class Placement(msgspec.Struct, frozen=True):
    """The class of a pod's packets.

    minor: of the class. shared: the class of the pod's QoS class, SYSTEM, LS or BE; another one
    than `minor` for a pod with a class of its own. keys: what distinguishes the packets.
    limit: why the pod has a class of its own. lacking: why its packets, or some of them, are in
    another class than its QoS class asks for; "" if they are not. faults: of its annotation.
    """

    minor: int
    shared: int
    keys: tuple[Member, ...]
    reason: Reason
    limit: Reason | None = None
    lacking: str = ""
    faults: tuple[InputError, ...] = ()


def class_reason(minor: int, slo: NodeSLOSpec, device: str) -> Reason:
    """Return why a shared class (SYSTEM, LS, BE) has its rates.

    device: the name of the shaped device, whose speed counts where the NodeSLO sets no total.
    """
    if minor == SYSTEM:
        if slo.system_strategy.total_network_bandwidth.value():
            total, source = "totalNetworkBandwidth", _TOTAL
        else:
            total, source = f"the speed of {device}", f"speed of {device}"
        return Reason(f"what ls and be leave of {total}, up to all of it", source)
    name = _CLASS[minor]
    strategy = slo.resource_qos_strategy
    qos = (strategy.ls_class if minor == LS else strategy.be_class).network_qos
    source = f"{_STRATEGY}.{name}.networkQOS"
    if not qos.enable:
        return Reason("not enabled: no guarantee, and the total as its limit", f"{source}.enable")
    return Reason(_rates(qos), source)


def _rates(qos: NetworkQOS) -> str:
    limit = "no egressLimit" if qos.egress_limit in (0, "0") else _rate("Limit", qos.egress_limit)
    return f"{_rate('Request', qos.egress_request)}, {limit}"


def _rate(what: str, rate: int | str) -> str:
    return f"egress{what} {rate} %" if isinstance(rate, int) else f"egress{what} {rate}"


def placements(pods: Iterable[PodOnNetwork], members: Mapping[Member, int]) -> dict[str, Placement]:
    """Return UID -> class, of all pods that have not ended. members: of `NetworkClasses`."""
    live = [each for each in by_age(pods) if not each.pod.ended]
    holders = {key: each.pod.uid for each in live for key in packet_keys(each)}
    return {each.pod.uid: _placement(each, members, holders) for each in live}


def _placement(
    each: PodOnNetwork, members: Mapping[Member, int], holders: Mapping[Member, str]
) -> Placement:
    pod = each.pod
    shared = shared_class(pod.qos)
    keys = tuple(packet_keys(each))
    if pod.qos is QoSClass.NONE:
        reason = Reason("no QoS class", f"label {LABEL_QOS_CLASS}")
    else:
        reason = Reason(f"QoS class {pod.qos}", f"label {LABEL_QOS_CLASS}")
    faults: list[InputError] = []
    bits = pod_limit(pod, faults)
    found = [members.get(key, SYSTEM) for key in keys]
    minor = found[-1] if found else SYSTEM
    own = minor not in SHARED
    limit = None
    lacking = ""
    if not keys:
        # Nothing is lost by a pod whose packets are in this class anyway, unless it has a limit.
        if shared != SYSTEM or bits:
            lacking = each.no_group or "its status has no address yet"
    elif any(holders[key] != pod.uid for key in keys):
        lacking = "a newer pod has the same address"
    elif own:
        limit = Reason(f"egressLimit of {bits} bit/s", f"annotation {ANNOTATION_NETWORK_QOS}")
    elif bits:
        lacking = "no class of its own: other pods have all the numbers"
    return Placement(minor, shared, keys, reason, limit, lacking, tuple(faults))
