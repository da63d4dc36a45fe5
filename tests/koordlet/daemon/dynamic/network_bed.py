"""A node whose traffic is shaped: its files are the test's, its devices are in a namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from apis.effective_nodeslo import decode_nodeslo
from apis.keys import ANNOTATION_NETWORK_QOS
from apis.qos import QoSClass
from hooks.facts import NodeInputs, Settings
from hooks.subject import PodSubject
from koordlet.daemon.dynamic.network_qos import NetworkQos
from koordlet.executor.network import FILE_NAME, Changed, Network
from koordlet.qos.strategy import Note
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.htb import HtbClass, Shaping
from service.events import Events
from tests.beds.network import Namespace, device
from tests.koordlet.configured import configured
from tests.koordlet.prediction.pods import pod

ROUTE = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth1 00000000 010200C0 0003 0 0 200 00000000 0 0 0
eth0 00000000 010200C0 0003 0 0 100 00000000 0 0 0
eth0 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0
"""
ROUTE6 = f"""{"0" * 32} 00 {"0" * 32} 00 {"0" * 32} ffffffff 00000001 00000000 00200200 lo
{"0" * 32} 00 {"0" * 32} 00 fe80{"0" * 27}1 00000400 00000001 00000000 00000003 eth6
"""


class Files:
    """The node's files of devices and routes."""

    def __init__(self, index: int = 7) -> None:
        self.content = {
            "/proc/1/net/route": ROUTE,
            "/sys/class/net/eth0/ifindex": f"{index}\n",
            "/sys/class/net/eth0/mtu": "1500\n",
            "/sys/class/net/eth0/speed": "1000\n",
        }
        self.namespaces = {"/proc/1/ns/net": 1, "/proc/self/ns/net": 1}

    def read(self, path: str) -> bytes:
        if path not in self.content:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.content[path].encode()

    def inode(self, path: str) -> int:
        if path not in self.namespaces:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.namespaces[path]


class Remembering(Network):
    """The effector, which also counts what it was asked; refuses with `error` once it is set."""

    def __init__(self, marker: str) -> None:
        super().__init__(marker)
        self.applied_to: list[int] = []
        self.wanted: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def apply(self, index: int, **wanted: Any) -> Changed:
        self.applied_to.append(index)
        self.wanted.append(wanted)
        if self.error is not None:
            raise self.error
        return super().apply(index, **wanted)


class Bed:
    def __init__(self, folder: Path, index: int) -> None:
        self.folder = folder
        self.files = Files(index)
        self.now = 1000.0
        self.pods: tuple[PodView, ...] = (view("a", "10.0.0.1"),)
        self.events = Events()
        self.notes: list[Note] = []
        self.listed = True
        self.layout: Layout | None = None
        self.gate = True
        self.ask()
        self.start()

    def start(self, **network_qos: str) -> None:
        """Start a daemon's part; an earlier one is as if it was killed."""
        self.network = Remembering(str(self.folder / FILE_NAME))
        self.qos = NetworkQos(
            configured(networkQos=network_qos),
            host=cast("Host", self.files),
            inputs=lambda: self.inputs,
            pods=lambda: self.pods,
            layout=lambda: self.layout,
            listed=lambda: self.listed,
            events=self.events,
            noted=self.notes.append,
            network=self.network,
            clock=lambda: self.now,
        )

    def ask(self, *, policy: str = "tc", total: str = "800M", **qos: Any) -> None:
        spec = {
            "systemStrategy": {"totalNetworkBandwidth": total},
            "resourceQOSStrategy": {
                "policies": {"netQOSPolicy": policy},
                "beClass": {"networkQOS": {"enable": True} | qos},
            },
        }
        self.inputs = NodeInputs(
            slo=decode_nodeslo({"spec": spec}, obj="NodeSLO n1"),
            settings=Settings(feature_gates={"TCNetworkQoS": self.gate}),
        )

    def switch(self, gate: bool) -> None:
        self.gate = gate
        self.ask()


def view(
    uid: str, *addresses: str, egress: str = "", qos: QoSClass = QoSClass.LS, **fields: Any
) -> PodView:
    """Return a pod with these addresses. egress: of its annotation; fields: of the Pod."""
    made = msgspec.structs.replace(pod(uid, qos=qos), **fields)
    if egress:
        limits = f'{{"egressLimit":"{egress}"}}'
        made = msgspec.structs.replace(made, annotations={ANNOTATION_NETWORK_QOS: limits})
    return PodView(made, PodSubject(pod=made), (), (), (), addresses=addresses)


class Kernel:
    """A bed in a namespace with a device, and what the kernel has there."""

    def __init__(self, bed: Bed, namespace: Namespace, index: int) -> None:
        self.bed = bed
        self.namespace = namespace
        self.index = index

    def look(self, after_s: float = 1.0) -> dict[int, HtbClass]:
        """Look once; return the classes in the kernel."""
        self.bed.now += after_s
        self.namespace.run(self.bed.qos.look)
        return self.classes()

    def classes(self) -> dict[int, HtbClass]:
        shaping = self.namespace.run(Shaping)
        try:
            return shaping.classes(self.index)
        finally:
            shaping.close()

    @property
    def problems(self) -> tuple[str, ...]:
        return self.bed.qos.status.problems


@contextmanager
def shaped_node(folder: Path) -> Iterator[Kernel]:
    """A bed in a namespace of its own."""
    with device() as (namespace, index):
        bed = Bed(folder, index)
        try:
            yield Kernel(bed, namespace, index)
        finally:
            bed.network.close()
