"""Keeps the traffic classes of the node's network device as the NodeSLO and the pods ask for.

They exist while gate TCNetworkQoS is on and the NodeSLO's `netQOSPolicy` is tc. A NodeSLO that
cannot be used leaves the last classes in force, for the pods of now. Everything that blocks runs in
a worker thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor as Workers
from contextlib import suppress
from typing import Any, Final

import msgspec

from apis.errors import InputErrors
from apis.nodeslo import NetQOSPolicy, NodeSLOSpec
from hooks.facts import NodeInputs
from koordlet.configuration.config import Config
from koordlet.events import Events, Severity
from koordlet.executor.network import Changed, Network, Occupied
from koordlet.qos.network.classes import (
    SYSTEM,
    Line,
    NetworkClasses,
    PodOnNetwork,
    name_of,
    network_classes,
)
from koordlet.qos.strategy import Note
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.htb import MAJOR
from linux.network_devices import NetworkDevice, default_device, network_device
from linux.packet_classes import Group

GATE: Final = "TCNetworkQoS"
NAME: Final = "network-qos"
_LOG = logging.getLogger("koordlet")
_LOOK_EVERY_S: Final = 1.0
"""Between two looks at pods and NodeSLO. Chosen: a new pod is in its class after a second. Half of
it doubles the comparisons of an idle node."""
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


class NetworkQosStatus(msgspec.Struct, frozen=True):
    """What `koordctl status` and the metrics show.

    on: gate and NodeSLO ask for it. why: what asks, or does not. wanted: None until it is known.
    problems: what is not in force, and why. writes, failures: since the start. took_s: the last
    comparison with the kernel.
    """

    on: bool = False
    why: str = ""
    device: str = ""
    wanted: NetworkClasses | None = None
    problems: tuple[str, ...] = ()
    checked_at: float | None = None
    writes: int = 0
    failures: int = 0
    took_s: float = 0.0


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
        workers: Workers,
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
        self._workers = workers
        self._network = network
        self._clock = clock
        self._slo: NodeSLOSpec | None = None
        """The last NodeSLO that could be used."""
        self._seen: tuple[object, ...] = ()
        self._in_force: tuple[object, ...] = ()
        self._check_at = 0.0
        self._again_at = 0.0
        self.status = NetworkQosStatus()

    async def run(self) -> None:
        """Look again and again."""
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(self._workers, self.look)
            await asyncio.sleep(_LOOK_EVERY_S)

    def look(self) -> None:
        """Make the kernel what is asked for, if something has changed; report what cannot be."""
        inputs = self._inputs()
        gate = inputs.settings.gate(GATE, default=False)
        policy = inputs.slo.resource_qos_strategy.policies.net_qos_policy
        on = gate and policy is NetQOSPolicy.TC
        why = f"gate {GATE}" if on else f"netQOSPolicy is {policy}" if gate else f"gate {GATE} off"
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
        groups = self._groups(pods)
        try:
            device = self._find_device()
        except (OSError, ValueError) as error:
            self._failed(True, why, str(error))
            return
        now = self._clock()
        seen = slo, pods, groups, device
        if seen == self._seen and now < max(self._check_at, self._again_at):
            return
        self._seen = seen
        wanted, problem = self._wanted(slo, pods, groups, device)
        if wanted is None:
            self._failed(True, why, problem, device=device.name)
            return
        if now < self._check_at and (device, wanted, problem) == self._in_force:
            return  # what changed about the pods is nothing to the network
        began = time.perf_counter()
        try:
            changed = self._network.apply(
                device.index, classes=wanted.classes, default=SYSTEM, members=wanted.members
            )
        except Occupied as occupied:
            self._failed(True, why, f"{device.name}: {occupied}", device=device.name)
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
        self.status = NetworkQosStatus(
            on=True,
            why=why,
            device=device.name,
            wanted=wanted,
            problems=problems,
            checked_at=now,
            writes=self.status.writes + changed.writes,
            failures=self.status.failures + len(changed.problems),
            took_s=took_s,
        )

    def _find_device(self) -> NetworkDevice:
        """Return the device to shape. Raises OSError, and ValueError with what is to be done."""
        try:
            outside = self._host.inode("/proc/1/ns/net") != self._host.inode("/proc/self/ns/net")
        except OSError:
            outside = False  # it cannot be looked at; the device's number decides
        if outside:
            raise ValueError("koordlet is not in the node's network namespace: hostNetwork")
        name = self._device or default_device(self._host)
        if not name:
            raise ValueError("there is no default route: set networkQos.device")
        try:
            return network_device(self._host, name)
        except FileNotFoundError:
            raise ValueError(f"there is no network device {name}") from None

    def _groups(self, pods: Collection[PodView]) -> dict[str, Group]:
        """Return the groups of the pods on the node's network by UID; none on cgroup v1.

        A group that is made again has another number, so this looks each time.
        """
        layout = self._layout()
        if layout is None or layout.version != 2:
            return {}
        found = {}
        for view in pods:
            pod = view.pod
            if pod.host_network and pod.cgroup:
                with suppress(OSError):  # not made yet, or gone
                    inode = self._host.inode(f"{layout.hierarchy('')}/{pod.cgroup}")
                    found[pod.uid] = Group(pod.cgroup.count("/") + 1, inode)
        return found

    def _wanted(
        self,
        slo: NodeSLOSpec,
        pods: Collection[PodView],
        groups: Mapping[str, Group],
        device: NetworkDevice,
    ) -> tuple[NetworkClasses | None, str]:
        """Return what is wanted, by the last NodeSLO that can be used; and what is wrong."""
        members = [
            PodOnNetwork(view.pod, view.addresses, groups.get(view.pod.uid)) for view in pods
        ]
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

    def _failed(self, on: bool, why: str, problem: str, *, device: str = "") -> None:
        """Try again later. What is in force stays."""
        self._again_at = self._clock() + _AGAIN_S
        self._check_at = 0.0
        self._report(device or NAME, (problem,))
        self.status = msgspec.structs.replace(
            self.status,
            on=on,
            why=why,
            device=device or self.status.device,
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
            "classes": []
            if wanted is None
            else [
                {
                    "class": f"{MAJOR:x}:{each.minor:x}",
                    "name": name_of(each.minor),
                    "rateBits": each.rate * 8,
                    "ceilBits": each.ceil * 8,
                    "members": sum(1 for minor in wanted.members.values() if minor == each.minor),
                }
                for each in wanted.classes
                if each.quantum
            ],
            "checkedSecondsAgo": None
            if status.checked_at is None
            else round(now - status.checked_at, 1),
            "lastCheckMs": round(status.took_s * 1000, 2),
            "writes": status.writes,
            "failures": status.failures,
        }

    def gauges(self) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Return the series of the metrics, by name without `koordlet_`. Any thread."""
        status = self.status
        made: list[tuple[str, tuple[tuple[str, str], ...], float]] = [
            ("network_qos_on", (), float(status.on)),
            ("network_qos_problems", (), float(len(status.problems))),
        ]
        if status.on and status.wanted is not None:
            own = 0
            for each in status.wanted.classes:
                if each.quantum == 0:
                    continue
                name = name_of(each.minor)
                if name == "pod":
                    own += 1
                    continue
                label = (("class", name),)
                made.append(("network_qos_class_ceil_bits", label, float(each.ceil * 8)))
            made.append(("network_qos_limited_pods", (), float(own)))
            made.append(("network_qos_members", (), float(len(status.wanted.members))))
        return made


def _reason(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"{error.strerror}: koordlet needs CAP_NET_ADMIN (docs/qos.md, Network QoS)"
    return error.strerror or str(error)
