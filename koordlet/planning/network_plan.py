"""Network QoS in `koordctl plan`: the steps that other objects would lead to.

The kernel is read and compared as the daemon does at each look; the steps are not carried out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from apis.errors import InputErrors
from apis.keys import ANNOTATION_NETWORK_QOS
from apis.nodeslo import NodeSLOSpec
from hooks.facts import NodeInputs
from koordlet.executor.network import Difference, Network, Occupied, Operation, Step
from koordlet.planning.explain import Plain
from koordlet.planning.network_values import (
    CLASS,
    DEFAULT_TEXT,
    DEVICE,
    ROOT_TEXT,
    class_text,
    rates_text,
)
from koordlet.qos.network.classes import (
    FIRST_OWN,
    SHARED,
    SYSTEM,
    Line,
    NetworkClasses,
    PodOnNetwork,
    group_of,
    name_of,
    network_classes,
)
from koordlet.qos.network.on_node import groups_on_node, is_on, on_network, shaped_device
from koordlet.qos.network.reasons import Placement, class_reason, placements
from koordlet.qos.network.status import NAME
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.htb import MAJOR
from linux.network_devices import NetworkDevice, device_name
from linux.packet_classes import TABLE, Member


class Shaped(msgspec.Struct, frozen=True):
    """What a plan needs besides the objects. network: reads the kernel; in the daemon one of the
    plan's own. device: as configured. offline: without a daemon, so pods may lack their addresses.
    """

    network: Network
    device: str
    offline: bool = False


def plan_network(
    shaped: Shaped,
    inputs: NodeInputs,
    *,
    host: Host,
    layout: Layout | None,
    pods: Collection[PodView],
) -> tuple[list[Plain], list[Plain]]:
    """Return the writes, in order, and what cannot be planned. Nothing is written."""
    try:
        return _planned(shaped, inputs, host, layout, pods)
    finally:
        shaped.network.close()


def _planned(
    shaped: Shaped,
    inputs: NodeInputs,
    host: Host,
    layout: Layout | None,
    pods: Collection[PodView],
) -> tuple[list[Plain], list[Plain]]:
    try:
        on, why = is_on(inputs)
        if not on:
            return _removals(shaped.network, why), []
        members = on_network(pods, groups_on_node(host, layout, pods))
        device = shaped_device(host, shaped.device)
        wanted = network_classes(inputs.slo, members, Line(device.name, device.bits, device.mtu))
        difference = shaped.network.look(device.index, classes=wanted.classes)
    except InputErrors as errors:
        return [], [_problem(each.obj, str(each)) for each in errors.errors]
    except Occupied as occupied:
        return [], [_problem(NAME, f"{device.name}: {occupied}")]
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return [], [_problem(NAME, f"traffic classes cannot be planned: {text}")]
    problems = [_problem(each.obj, str(each)) for each in wanted.faults]
    if difference.unreadable:
        text = f"packets cannot be classified with nftables: {difference.unreadable}"
        problems.append(_problem(NAME, text))
    writes = _roots(device, difference, why)
    if shaped.offline and not (pods and all(view.described for view in pods)):
        text = "pods are left out: their addresses are in Pod objects only"
        steps = [
            step
            for step in (*difference.first, *difference.last)
            if step.each.minor < FIRST_OWN and _changes_rates(step, difference)
        ]
        rows = _step_rows(steps, device, difference, inputs.slo, {})
        return [*writes, *rows], [*problems, _problem(NAME, text)]
    places = placements(members, wanted.members)
    names = {
        places[each.pod.uid].minor: f"{each.pod.namespace}/{each.pod.name}"
        for each in members
        if each.pod.uid in places and places[each.pod.uid].limit is not None
    }
    writes += _step_rows(difference.first, device, difference, inputs.slo, names)
    writes += _moves(members, places, wanted, difference, device)
    writes += _step_rows(difference.last, device, difference, inputs.slo, names)
    return writes, problems


def _removals(network: Network, why: str) -> list[Plain]:
    """Return what is taken away while network QoS is off."""
    if not network.applied:
        return []
    return [
        _write("delete", device_name(index), DEVICE, ROOT_TEXT, DEFAULT_TEXT, why)
        for index in network.devices()
    ]


def _roots(device: NetworkDevice, difference: Difference, why: str) -> list[Plain]:
    elsewhere = f"{NAME}: the shaped device is {device.name}"
    writes = [
        _write("delete", device_name(index), DEVICE, ROOT_TEXT, DEFAULT_TEXT, elsewhere)
        for index in difference.elsewhere
    ]
    if not difference.root:
        writes.append(_write("add", device.name, DEVICE, DEFAULT_TEXT, ROOT_TEXT, why))
    return writes


def _step_rows(
    todo: Sequence[Step],
    device: NetworkDevice,
    difference: Difference,
    slo: NodeSLOSpec,
    names: Mapping[int, str],
) -> list[Plain]:
    """Return a row for each step. names: minor number -> pod, of the classes of single pods."""
    rows = []
    for step in todo:
        each = step.each
        before = None if step.operation is Operation.ADD else difference.present.get(each.minor)
        then = None if step.operation is Operation.DELETE else each
        old, new = rates_text(before), rates_text(then)
        if old == new and before is not None and then is not None:
            old, new = f"{old}, quantum {before.quantum}", f"{new}, quantum {then.quantum}"
        name = name_of(each.minor)
        rows.append(
            _write(
                step.operation.value,
                names.get(each.minor, device.name) if name == "pod" else device.name,
                f"{CLASS} {name} {MAJOR:x}:{each.minor:x}",
                old or "",
                new or "-",
                _why_step(step, slo, device),
                path=f"{device.name} {MAJOR:x}:{each.minor:x}",
            )
        )
    return rows


def _why_step(step: Step, slo: NodeSLOSpec, device: NetworkDevice) -> str:
    minor = step.each.minor
    if step.operation is Operation.DELETE:
        return f"{NAME}: nothing asks for this class"
    if name_of(minor) == "pod":
        return f"{NAME}: annotation {ANNOTATION_NETWORK_QOS}"
    for shared in SHARED:
        if minor in (shared, group_of(shared)):
            return f"{NAME}: {class_reason(shared, slo, device.name).text}"
    return f"{NAME}: the node's bandwidth"


def _changes_rates(step: Step, difference: Difference) -> bool:
    before = difference.present.get(step.each.minor)
    return step.operation is not Operation.CHANGE or rates_text(before) != rates_text(step.each)


def _moves(
    pods: Sequence[PodOnNetwork],
    places: Mapping[str, Placement],
    wanted: NetworkClasses,
    difference: Difference,
    device: NetworkDevice,
) -> list[Plain]:
    """Return a row for each pod whose packets get another class, and one for members of no pod."""
    table = difference.table
    found: Mapping[Member, int] = {} if table is None else table.members
    rows = []
    if table is None and not difference.unreadable:
        rows.append(
            _write("add", device.name, "network.table", "", f"inet {TABLE}", f"{NAME}: which class")
        )
    owned: set[Member] = set()
    by_minor = {each.minor: each for each in wanted.classes}
    for each in pods:
        place = places.get(each.pod.uid)
        if place is None:
            continue
        owned.update(place.keys)
        before = {found.get(key, SYSTEM) for key in place.keys}
        if before <= {place.minor}:
            continue
        old = ", ".join(f"{name_of(minor)} {MAJOR:x}:{minor:x}" for minor in sorted(before))
        why = place.reason if place.limit is None else place.limit
        name = f"{each.pod.namespace}/{each.pod.name}"
        new = class_text(place.minor, by_minor[place.minor], place.shared)
        rows.append(_write("move", name, CLASS, old, new, f"{NAME}: {why.text}"))
    if left := [key for key in found if key not in owned]:
        text = f"{len(left)} addresses or cgroups"
        rows.append(
            _write("delete", device.name, CLASS, text, "-", f"{NAME}: no pod has them any more")
        )
    return rows


def _write(
    act: str, name: str, resource: str, old: str, new: str, why: str, *, path: str = ""
) -> Plain:
    return {
        "act": act,
        "path": path or name,
        "subject": "node",
        "name": name,
        "resource": resource,
        "old": old,
        "new": new,
        "why": why,
        "final": True,
    }


def _problem(obj: str, message: str) -> Plain:
    return {"file": "", "object": obj, "message": message}
