"""The traffic classes that network QoS asks for, and which pod sends in which. Pure.

The node's classes are a tree (rates in the comments: what is guaranteed, up to what):

    1        the node                          the line, the line
    10         system                          the rest of the line, the line
    18           everything without a class of its own
    20         LSE, LSR and LS pods            lsClass' egressRequest, its egressLimit
    28           those without a limit of their own
    30         BE pods                         beClass' egressRequest, its egressLimit
    38           those without a limit of their own
    ...8         a pod with an egressLimit     next to nothing, its limit; below its pod's class

Numbers are hexadecimal, as tc shows them. What a class leaves unused is offered first to system,
then to LS, then to BE. Inside a class, pods with a class of their own and the rest take turns by
their number. A pod's own class lies below its QoS class, so that all of its pods together keep to
what the NodeSLO sets.

The number of a class is the priority of its packets. Other devices may choose a queue by the last
four bits: all numbers end with 8, which Linux treats as it treats 0, what packets have without us.
"""

from __future__ import annotations

import ipaddress
import zlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from apis.annotations import parse_network_qos
from apis.errors import InputError, InputErrors
from apis.keys import ANNOTATION_NETWORK_QOS
from apis.nodeslo import NodeSLOSpec
from apis.qos import QoSClass
from hooks.subject import Pod
from koordlet.qos.network.bandwidth import Rate, bandwidths
from linux.htb import HtbClass, ticks
from linux.packet_classes import Group, Member

_NODE: Final = 0x1
SYSTEM: Final = 0x18
LS: Final = 0x28
BE: Final = 0x38
SHARED: Final = (SYSTEM, LS, BE)
_GROUP: Final = -0x8
"""From the class of the pods without a limit to the group that it shares with the others."""
FIRST_OWN: Final = 0x100
"""The least number of a pod's own class."""
_OWN_STEP: Final = 0x10
_OWN_COUNT: Final = (0x10000 - FIRST_OWN) // _OWN_STEP

_CLASS_OF: Final = {
    QoSClass.LSE: LS,
    QoSClass.LSR: LS,
    QoSClass.LS: LS,
    QoSClass.BE: BE,
}
_PRIO: Final = {SYSTEM: 1, LS: 2, BE: 3}  # upstream's

_BITS: Final = 8
_LEAST: Final = 1_000
"""Bytes per second of a class without a guarantee: the kernel takes no 0. Chosen: a full frame in
1.5 s keeps a connection alive. Twice the value for a thousand pods would be 16 Mbit/s."""
_TICKS_PER_SECOND: Final = 250
"""A class may send in one go what its rate allows in 4 ms, and a frame. Upstream's formula, with
the timer frequency of most kernels. Larger bursts delay the next class by as much."""
_FRAME_HEADER: Final = 18
"""Bytes of an Ethernet header with a VLAN tag, which the MTU does not count."""
_TURN: Final = 15_000
"""Bytes of a pod's turn: ten full frames. Chosen: shares are fair to a few frames; twice the value
doubles how long the others wait, and halves how often the kernel changes between classes."""
_MOST_TURNS: Final = 16
"""Of the pods that share a class, whatever their number: 240 kB, 2 ms at 1 Gbit/s."""


class PodOnNetwork(msgspec.Struct, frozen=True):
    """A pod and its addresses, as its status lists them.

    group: its cgroup, for a pod on the node's network whose sockets are recognised by their cgroup.
    no_group: why a pod on the node's network has no group.
    """

    pod: Pod
    addresses: tuple[str, ...] = ()
    group: Group | None = None
    no_group: str = ""


class Line(msgspec.Struct, frozen=True):
    """A network device. bits: its speed per second, 0 when unknown. mtu: bytes."""

    name: str
    bits: int
    mtu: int


class NetworkClasses(msgspec.Struct, frozen=True):
    """What is wanted of the kernel.

    classes: parents before their children. members: what distinguishes the packets -> minor number
    of the class; everything else is in the class SYSTEM. faults: bad input that cost a pod its
    limit.
    """

    bits: int
    classes: tuple[HtbClass, ...]
    members: Mapping[Member, int]
    faults: tuple[InputError, ...] = ()


def name_of(minor: int) -> str:
    """Return what people call a class: system, ls, be, or pod for a pod's own; groups likewise."""
    names = {SYSTEM: "system", LS: "ls", BE: "be", _NODE: "node"}
    return names.get(minor) or names.get(minor - _GROUP, "pod")


def group_of(minor: int) -> int:
    """Return the class that holds the guarantee of a shared class (SYSTEM, LS, BE)."""
    return minor + _GROUP


def shared_class(qos: QoSClass) -> int:
    """Return the class of the pods of a QoS class: SYSTEM, LS or BE."""
    return _CLASS_OF.get(qos, SYSTEM)


def network_classes(slo: NodeSLOSpec, pods: Iterable[PodOnNetwork], line: Line) -> NetworkClasses:
    """Return the classes and their members; raises InputErrors when the NodeSLO cannot be used."""
    rates = bandwidths(slo, line_bits=line.bits)
    if not rates.total:
        raise InputErrors(
            [
                InputError(
                    obj="NodeSLO",
                    field="spec.systemStrategy.totalNetworkBandwidth",
                    value="0",
                    problem=f"it is not set, and {line.name} does not report its speed",
                )
            ]
        )
    _check(rates.ls.egress, rates.be.egress, rates.total)
    total = rates.total // _BITS
    guaranteed = {
        LS: rates.ls.egress.request // _BITS,
        BE: rates.be.egress.request // _BITS,
    }
    guaranteed[SYSTEM] = total - sum(guaranteed.values())
    ceil = {
        SYSTEM: total,
        LS: rates.ls.egress.limit // _BITS or total,
        BE: rates.be.egress.limit // _BITS or total,
    }
    members, own, faults = _members(pods)
    classes = [_class(_NODE, 0, total, total, line.mtu)]
    for shared in SHARED:
        group = group_of(shared)
        most = max(ceil[shared], _LEAST)
        classes.append(_class(group, _NODE, guaranteed[shared], most, line.mtu))
        turns = sum(1 for _, minor in members if minor == shared)
        classes.append(_class(shared, group, 0, most, line.mtu, turns=turns, prio=_PRIO[shared]))
        classes += [
            _class(minor, group, 0, min(limit, most), line.mtu, turns=1, prio=_PRIO[shared])
            for minor, (of_class, limit) in sorted(own.items())
            if of_class == shared
        ]
    by_key = {
        key: minor for member, minor in members if minor != SYSTEM for key in packet_keys(member)
    }
    return NetworkClasses(rates.total, tuple(classes), by_key, tuple(faults))


def _check(ls: Rate, be: Rate, total: int) -> None:
    errors = []
    for name, rate in (("lsClass", ls), ("beClass", be)):
        if rate.limit and rate.request > rate.limit:
            errors.append(
                _error(name, rate.request, f"more than the egressLimit of {rate.limit} bits/s")
            )
    if ls.request + be.request > total:
        errors.append(
            _error("beClass", be.request, f"with lsClass' {ls.request} more than {total} bits/s")
        )
    if errors:
        raise InputErrors(errors)


def _error(name: str, value: int, problem: str) -> InputError:
    return InputError(
        obj="NodeSLO",
        field=f"spec.resourceQOSStrategy.{name}.networkQOS.egressRequest",
        value=value,
        problem=problem,
    )


def _class(
    minor: int,
    parent: int,
    rate: int,
    ceil: int,
    mtu: int,
    *,
    turns: int | None = None,
    prio: int = 0,
) -> HtbClass:
    """Return a class. turns: how many pods send in it; None for one that only holds others."""
    rate = max(rate, _LEAST)
    ceil = max(ceil, rate)
    frame = mtu + _FRAME_HEADER
    return HtbClass(
        minor=minor,
        parent=parent,
        rate=rate,
        ceil=ceil,
        buffer=ticks(rate // _TICKS_PER_SECOND + frame, rate),
        cbuffer=ticks(ceil // _TICKS_PER_SECOND + frame, ceil),
        quantum=0 if turns is None else max(_TURN, frame) * min(max(turns, 1), _MOST_TURNS),
        prio=prio,
    )


def _members(
    pods: Iterable[PodOnNetwork],
) -> tuple[list[tuple[PodOnNetwork, int]], dict[int, tuple[int, int]], list[InputError]]:
    """Return each pod with its class; the pods' own classes, with QoS class and bytes per second;
    and bad annotations, whose pods are treated as without a limit."""
    members = []
    own: dict[int, tuple[int, int]] = {}
    faults: list[InputError] = []
    for each in by_age(pods):
        pod = each.pod
        if pod.ended or not packet_keys(each):
            continue
        shared = shared_class(pod.qos)
        limit = pod_limit(pod, faults)
        if not limit:
            members.append((each, shared))
            continue
        minor = _free(pod.uid, own)
        if minor is None:
            members.append((each, shared))
            continue
        own[minor] = (shared, max(limit // _BITS, _LEAST))
        members.append((each, minor))
    return members, own, faults


def by_age(pods: Iterable[PodOnNetwork]) -> list[PodOnNetwork]:
    """Return the pods, the oldest first, so that of two with one address the newest has it.

    The order decides about numbers too: it must not change when a pod is listed elsewhere.
    """
    return sorted(pods, key=lambda each: (each.pod.created_at, each.pod.uid))


def pod_limit(pod: Pod, faults: list[InputError]) -> int:
    """Return the egress limit of the pod's annotation in bits per second, 0 for none.

    faults: takes what is wrong with the annotation.
    """
    text = pod.annotations.get(ANNOTATION_NETWORK_QOS)
    if text is None:
        return 0
    try:
        return parse_network_qos(text, obj=pod.obj).egress_limit_bits or 0
    except InputError as error:
        faults.append(error)
    return 0


def _free(uid: str, taken: Mapping[int, object]) -> int | None:
    """Return the minor number of a pod's own class: by its UID, so that a restart finds the same.

    None when all 4080 numbers are taken.
    """
    first = zlib.crc32(uid.encode())
    for at in range(_OWN_COUNT):
        minor = FIRST_OWN + (first + at) % _OWN_COUNT * _OWN_STEP + 0x8
        if minor not in taken:
            return minor
    return None


def packet_keys(member: PodOnNetwork) -> list[Member]:
    """Return what the pod's packets are distinguished by.

    Addresses as the kernel writes them, without what is none; those of the node are not a pod's
    alone.
    """
    if member.pod.host_network:
        return [] if member.group is None else [member.group]
    found: list[Member] = []
    for text in member.addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if isinstance(address, ipaddress.IPv6Address):
            if address.scope_id is not None:
                continue  # of one link; the kernel's tables have no scope
            address = address.ipv4_mapped or address
        if not (address.is_unspecified or address.is_loopback or address.is_multicast):
            found.append(str(address))
    return found
