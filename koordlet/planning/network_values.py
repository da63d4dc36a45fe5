"""Network QoS in `koordctl explain`, in the form of all other values.

The node has a value for its device and one for each class that pods share; a pod has the class of
its packets. What is desired, why, and what the kernel has come from the last look at it.
"""

from __future__ import annotations

from typing import Final

from hooks.state import State
from hooks.subject import Pod
from koordlet.planning.explain import Plain
from koordlet.qos.network.classes import SHARED, SYSTEM, group_of, name_of
from koordlet.qos.network.reasons import Placement, Reason, class_reason, placements
from koordlet.qos.network.status import NAME, NetworkQosStatus
from linux.htb import MAJOR, HtbClass, rate_text
from linux.packet_classes import Group, Member

DEVICE: Final = "network.device"
CLASS: Final = "network.class"
"""The names of these values, beside those of `linux.resources`."""
ROOT_TEXT: Final = f"htb {MAJOR:x}:"
DEFAULT_TEXT: Final = "the kernel's default"


def values_of_node(status: NetworkQosStatus) -> list[Plain]:
    """Return the device and the shared classes; none while network QoS is off."""
    if not status.on or status.wanted is None or status.slo is None:
        return _without_classes(status)
    in_force = status.state is State.APPLIED
    device = _value(
        DEVICE,
        status.device,
        wanted=ROOT_TEXT,
        observed=ROOT_TEXT if in_force else None,
        reason=Reason(f"{status.why}; the device of {status.device_why}", status.device_why),
        state=status.state,
        detail="" if in_force else "; ".join(status.problems),
        path=status.device,
    )
    device["original"] = DEFAULT_TEXT
    return [device, *(_class_value(minor, status) for minor in SHARED)]


def _without_classes(status: NetworkQosStatus) -> list[Plain]:
    if not status.problems and not status.on:
        return []
    made = _value(
        DEVICE,
        status.device,
        wanted=ROOT_TEXT if status.on else DEFAULT_TEXT,
        observed=None,
        reason=Reason(status.why, status.why),
        state=status.state if status.problems else State.PENDING,
        detail="; ".join(status.problems) or status.why,
        path=status.device,
    )
    return [made]


def _class_value(minor: int, status: NetworkQosStatus) -> Plain:
    assert status.wanted is not None and status.slo is not None
    wanted = {each.minor: each for each in status.wanted.classes}
    group = group_of(minor)
    state, detail = status.state, ""
    if state is not State.APPLIED:
        detail = "; ".join(status.problems)
    elif any(status.classes.get(each) != wanted[each] for each in (group, minor)):
        state, detail = State.FAILED, "; ".join(status.problems)
    return _value(
        CLASS,
        name_of(minor),
        wanted=rates_text(wanted[group]),
        observed=rates_text(status.classes.get(group)),
        reason=class_reason(minor, status.slo, status.device),
        state=state,
        detail=detail,
        path=f"{status.device} {MAJOR:x}:{group:x}",
    )


def values_of_pod(status: NetworkQosStatus, pod: Pod) -> tuple[list[Plain], list[Plain]]:
    """Return the class of the pod's packets, and the faults of its annotation.

    Nothing while network QoS is off, and for a pod that has ended.
    """
    if not status.on or status.wanted is None or pod.ended:
        return [], []
    place = placements(status.pods, status.wanted.members).get(pod.uid)
    if place is None:
        waiting = Reason("its class is decided at the next look at the pods", NAME)
        made = _value(
            CLASS,
            "",
            wanted=None,
            observed=None,
            reason=waiting,
            state=State.PENDING,
            detail="not looked at yet",
            path=status.device,
        )
        return [made], []
    return [_pod_value(status, place)], [
        {"policy": NAME, "message": str(fault), "inputError": True} for fault in place.faults
    ]


def _pod_value(status: NetworkQosStatus, place: Placement) -> Plain:
    assert status.wanted is not None
    own = {each.minor: each for each in status.wanted.classes}[place.minor]
    found = {status.members.get(key, SYSTEM) for key in place.keys} or {SYSTEM}
    there = found <= status.classes.keys()
    state, detail = State.DEGRADED if place.lacking else State.APPLIED, ""
    if status.state is not State.APPLIED:
        state, detail = status.state, "; ".join(status.problems)
    elif found != {place.minor} or status.classes.get(place.minor) != own:
        state, detail = State.FAILED, "; ".join(status.problems)
    made = _value(
        CLASS,
        "",
        wanted=class_text(place.minor, own, place.shared),
        observed=", ".join(
            class_text(minor, status.classes[minor], place.shared) for minor in sorted(found)
        )
        if there
        else None,
        reason=place.reason,
        state=state,
        detail=detail,
        path=f"{status.device} {MAJOR:x}:{place.minor:x}",
    )
    if place.lacking:
        made["winner"]["degraded"] = place.lacking
        made["why"] += f"; but {place.lacking}"
    if place.limit is not None:
        made["modifiers"] = [_claim(place.limit, "within", rate_text(own.ceil * 8))]
        made["why"] += f"; then {NAME}: {place.limit.text}"
    made["members"] = [_member(key) for key in place.keys]
    made["why"] += f" (by {', '.join(made['members'])})" if place.keys else ""
    return made


def _member(key: Member) -> str:
    return f"cgroup with inode {key.inode}" if isinstance(key, Group) else key


def class_text(minor: int, each: HtbClass, shared: int) -> str:
    """Return a pod's class for people: a shared one by its name, its own with its limit."""
    if minor in SHARED:
        return f"{name_of(minor)} {MAJOR:x}:{minor:x}"
    return f"{MAJOR:x}:{minor:x} in {name_of(shared)}, up to {rate_text(each.ceil * 8)}"


def rates_text(each: HtbClass | None) -> str | None:
    if each is None:
        return None
    return f"rate {rate_text(each.rate * 8)}, ceil {rate_text(each.ceil * 8)}"


def _claim(reason: Reason, op: str, value: str | None) -> Plain:
    return {
        "policy": NAME,
        "op": op,
        "value": value,
        "reason": reason.text,
        "source": reason.source,
        "rank": 0,
    }


def _value(
    resource: str,
    key: str,
    *,
    wanted: str | None,
    observed: str | None,
    reason: Reason,
    state: State,
    detail: str,
    path: str,
) -> Plain:
    return {
        "resource": resource,
        "key": key,
        "requested": None,
        "value": wanted,
        "winner": _claim(reason, "set", wanted),
        "modifiers": [],
        "losers": [],
        "why": f"{NAME}: {reason.text}",
        "path": path,
        "desired": wanted,
        "observed": observed,
        "state": state.value,
        "detail": detail,
        "original": None,
        "retryInSeconds": 0.0,
        "writes": [],
    }
