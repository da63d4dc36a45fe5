"""Keeps the traffic classes of the node's network device as the NodeSLO and the pods ask for.

They exist while gate TCNetworkQoS is on and the NodeSLO's `netQOSPolicy` is tc. A NodeSLO that
cannot be used leaves the last classes in force, for the pods of now. The daemon calls `look`, which
blocks, in a worker thread about once a second.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from apis.errors import InputErrors
from apis.nodeslo import NodeSLOSpec
from hooks.facts import NodeInputs
from hooks.state import State
from koordlet.configuration.config import Config
from koordlet.executor.network import Changed, Network, Occupied
from koordlet.qos.network.classes import (
    SHARED,
    SYSTEM,
    Line,
    NetworkClasses,
    PodOnNetwork,
    group_of,
    name_of,
    network_classes,
)
from koordlet.qos.network.on_node import (
    DEFAULT_ROUTE,
    groups_on_node,
    is_on,
    on_network,
    shaped_device,
)
from koordlet.qos.network.status import NAME, NetworkQosStatus
from koordlet.qos.strategy import Note
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.htb import MAJOR
from linux.network_devices import NetworkDevice
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet")
_CHECK_EVERY_S: Final = 30.0
"""Between two reads of the kernel while nothing changes. Chosen: what another program removed is
back after half a minute. A read takes some milliseconds; half of it doubles them."""
_AGAIN_S: Final = 10.0
"""After something failed. Chosen: a device that comes back is shaped within ten seconds. Half of it
doubles what a lasting failure costs."""
_MOST_NOTED: Final = 8
"""Classes that one entry names: about two lines. The first entry after a start would be long."""
_VERBOSITY: Final = 3
"""Of entries in the audit log: as upstream's for changes of cgroup files."""


class NetworkQos:
    """`look` belongs to one worker thread at a time; `status` is for any thread."""

    def __init__(
        self,
        config: Config,
        *,
        host: Host,
        inputs: Callable[[], NodeInputs],
        pods: Callable[[], Collection[PodView]],
        layout: Callable[[], Layout | None],
        listed: Callable[[], bool],
        events: Events,
        noted: Callable[[Note], None],
        network: Network,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The callables return the newest values; any thread calls them. listed: whether every
        source of pods has listed them once. noted: takes entries of the audit log."""
        self._device = config.network_qos.device
        self._host = host
        self._inputs = inputs
        self._pods = pods
        self._layout = layout
        self._listed = listed
        self._events = events
        self._noted = noted
        self._network = network
        self._clock = clock
        self._slo: NodeSLOSpec | None = None
        """The last NodeSLO that could be used."""
        self._seen: tuple[object, ...] = ()
        self._in_force: tuple[object, ...] = ()
        self._check_at = 0.0
        self._again_at = 0.0
        self.status = NetworkQosStatus()

    def look(self) -> None:
        """Make the kernel what is asked for, if something has changed; report what cannot be."""
        inputs = self._inputs()
        on, why = is_on(inputs)
        try:
            if on:
                self._keep(inputs.slo, why)
            else:
                self._end(why)
        except Exception as error:  # noqa: BLE001 - isolated from the daemon, and reported
            _LOG.error("network QoS failed", exc_info=error)
            self._failed(on, why, f"a defect: {error!r}")

    # --- on ------------------------------------------------------------------------------------

    def _keep(self, slo: NodeSLOSpec, why: str) -> None:
        if not self._listed():
            self.status = msgspec.structs.replace(
                self.status, on=True, why=f"{why}; waiting for the first list of pods"
            )
            return  # the classes of an earlier run are better than ones without the pods
        pods = self._pods()
        groups = groups_on_node(self._host, self._layout(), pods)
        try:
            device = shaped_device(self._host, self._device)
        except (OSError, ValueError) as error:
            self._failed(True, why, str(error))
            return
        now = self._clock()
        seen = slo, pods, groups, device
        if seen == self._seen and now < max(self._check_at, self._again_at):
            return
        self._seen = seen
        members = on_network(pods, groups)
        wanted, problem = self._wanted(slo, members, device)
        if wanted is None:
            self._failed(True, why, problem, device=device.name)
            return
        if now < self._check_at and (device, wanted, problem) == self._in_force:
            # What changed about the pods changes no class, but perhaps a reason.
            self.status = msgspec.structs.replace(self.status, pods=members, slo=self._slo)
            return
        self.status = msgspec.structs.replace(
            self.status,
            on=True,
            why=why,
            device=device.name,
            device_why="networkQos.device" if self._device else DEFAULT_ROUTE,
            slo=self._slo,
            pods=members,
            wanted=wanted,
        )
        began = time.perf_counter()
        try:
            changed = self._network.apply(
                device.index, classes=wanted.classes, default=SYSTEM, members=wanted.members
            )
        except Occupied as occupied:
            self._failed(
                True, why, f"{device.name}: {occupied}", device=device.name, state=State.BLOCKED
            )
            return
        except OSError as error:
            self._network.close()
            self._failed(True, why, f"{device.name}: {_reason(error)}", device=device.name)
            return
        took_s = time.perf_counter() - began
        problems = tuple(each for each in (problem, *changed.problems) if each)
        self._in_force = device, wanted, problem
        self._check_at = now + (_AGAIN_S if changed.problems else _CHECK_EVERY_S)
        self._again_at = 0.0
        self._report(device.name, problems)
        self._note(device.name, changed)
        self.status = msgspec.structs.replace(
            self.status,
            state=State.APPLIED,
            classes=changed.classes_in_force,
            members=changed.members_in_force,
            problems=problems,
            checked_at=now,
            writes=self.status.writes + changed.writes,
            failures=self.status.failures + len(changed.problems),
            took_s=took_s,
        )

    def _wanted(
        self,
        slo: NodeSLOSpec,
        members: tuple[PodOnNetwork, ...],
        device: NetworkDevice,
    ) -> tuple[NetworkClasses | None, str]:
        """Return what is wanted, by the last NodeSLO that can be used; and what is wrong."""
        line = Line(device.name, device.bits, device.mtu)
        problem = ""
        try:
            wanted: NetworkClasses | None = network_classes(slo, members, line)
            self._slo = slo
        except InputErrors as errors:
            problem = str(errors)
            self._events.add("bad-object", "NodeSLO", problem, severity=Severity.ERROR)
            try:
                wanted = None if self._slo is None else network_classes(self._slo, members, line)
            except InputErrors:
                wanted = None  # it counted on the speed of another device
        if wanted is not None:
            for fault in wanted.faults:
                self._events.add("bad-object", NAME, str(fault))
        return wanted, problem

    # --- off -----------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """Take away what is ours, and only then stop to look."""
        now = self._clock()
        if now < self._again_at:
            return
        if self._network.applied:
            try:
                removed = self._network.remove()
            except OSError as error:
                self._network.close()
                self._failed(False, why, f"the traffic classes stay: {_reason(error)}")
                return
            self._network.close()
            if removed:
                self._noted(Note(_VERBOSITY, NAME, f"traffic classes removed: {why}"))
        self._slo = None
        self._seen = self._in_force = ()
        self._check_at = self._again_at = 0.0
        self.status = NetworkQosStatus(
            why=why, writes=self.status.writes, failures=self.status.failures
        )

    # --- reports -------------------------------------------------------------------------------

    def _failed(
        self, on: bool, why: str, problem: str, *, device: str = "", state: State = State.FAILED
    ) -> None:
        """Try again later. What is in force stays, but another's qdisc has no classes of ours."""
        self._again_at = self._clock() + _AGAIN_S
        self._check_at = 0.0
        self._report(device or NAME, (problem,))
        self.status = msgspec.structs.replace(
            self.status,
            on=on,
            why=why,
            device=device or self.status.device,
            state=state,
            classes={} if state is State.BLOCKED else self.status.classes,
            problems=(problem,),
            failures=self.status.failures + 1,
        )

    def _report(self, obj: str, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self.status.problems:
                self._events.add(NAME, obj, problem, severity=Severity.ERROR)

    def _note(self, device: str, changed: Changed) -> None:
        if not changed.writes:
            return
        parts = ["root made"] if changed.made else []
        parts += [
            f"{step.operation} {name_of(step.each.minor)} "
            f"{step.each.rate * 8}-{step.each.ceil * 8} bit/s"
            for step in changed.classes[:_MOST_NOTED]
        ]
        if len(changed.classes) > _MOST_NOTED:
            parts.append(f"{len(changed.classes) - _MOST_NOTED} more classes")
        if changed.members:
            parts.append(f"{changed.members} members moved")
        self._noted(Note(_VERBOSITY, NAME, f"{device}: {', '.join(parts)}"))

    def as_json(self) -> dict[str, Any]:
        """Return the status for `koordctl status`. Any thread."""
        status = self.status
        now = self._clock()
        wanted = status.wanted
        return {
            "state": "on" if status.on else "off",
            "why": status.why,
            "device": status.device,
            "bitsPerSecond": 0 if wanted is None else wanted.bits,
            "problems": list(status.problems),
            "handle": f"{MAJOR:x}:",
            "classes": _classes(status),
            "checkedSecondsAgo": None
            if status.checked_at is None
            else round(now - status.checked_at, 1),
            "lastCheckMs": round(status.took_s * 1000, 2),
            "writes": status.writes,
            "failures": status.failures,
        }


def _classes(status: NetworkQosStatus) -> list[dict[str, Any]]:
    """Return the classes in force that packets are in, each shared one with its group's rate."""
    made = []
    for minor, each in sorted(status.classes.items()):
        if not each.quantum:
            continue
        group = status.classes.get(group_of(minor)) if minor in SHARED else None
        made.append(
            {
                "class": f"{MAJOR:x}:{minor:x}",
                "name": name_of(minor),
                "rateBits": (group or each).rate * 8,
                "ceilBits": each.ceil * 8,
                "members": sum(1 for other in status.members.values() if other == minor),
            }
        )
    return made


def _reason(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"{error.strerror}: koordlet needs CAP_NET_ADMIN (docs/qos.md, Network QoS)"
    return error.strerror or str(error)
