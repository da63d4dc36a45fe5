"""The device may be of any kind: packets keep their class on the way down to it.

Bonds and VLANs are kernel modules that not every machine has. In the virtual machine koordlet
shapes a VLAN on a bond (tests/vm/inside/test_traffic.py).
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from koordlet.executor.network import Network
from linux.htb import HtbClass, ticks
from linux.network_devices import default_device
from linux.packet_classes import Member
from tests.beds.network import Namespace, Routed, require_shaping, routed
from tests.waiting import wait_until

_RATE = 125_000_000
_CLASSES = tuple(
    HtbClass(minor, parent, _RATE, _RATE, ticks(2000, _RATE), ticks(2000, _RATE), quantum)
    for minor, parent, quantum in ((0x1, 0, 0), (0x18, 0x1, 15_000), (0x38, 0x1, 15_000))
)
_DATAGRAMS = 60
_KINDS = {
    "veth": ("eth0", ()),
    "bridge": ("br0", ("link add br0 type bridge", "link set eth0 master br0")),
    "macvlan": ("mac0", ("link add link eth0 name mac0 type macvlan",)),
}
"""Kind -> the device that has the node's address, and the commands that make it over eth0."""


class _OwnFiles:
    """The files of this thread's namespace, where a daemon reads those of the node."""

    def read(self, path: str) -> bytes:
        return Path(path.replace("/proc/1/", "/proc/thread-self/")).read_bytes()


def _make(net: Routed, kind: str) -> str:
    """Give the node an uplink of this kind, and the world the other end; return its name."""
    name, commands = _KINDS[kind]
    for command in commands:
        net.node.ip(command)
    net.node.ip("addr flush dev eth0")
    net.node.ip(f"addr add 10.9.9.1/24 dev {name}")
    net.node.ip(f"link set dev {name} up")
    net.node.ip("route add default via 10.9.9.2")
    return name


def _send(to: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for _ in range(_DATAGRAMS):
            sending.sendto(bytes(1000), (to, 9))


def _sent(node: Namespace, device: str, minor: int) -> int:
    """Return the bytes that a class of the device has sent."""
    words = node.tc(f"-s class show dev {device}").split()
    return int(words[words.index("Sent", words.index(f"4b4f:{minor:x}")) + 1])


@pytest.mark.root
@pytest.mark.parametrize("kind", _KINDS)
def test_packets_are_in_their_class_on_an_uplink_of_any_kind(kind: str, tmp_path: Path) -> None:
    require_shaping()
    with routed() as net:
        device = _make(net, kind)
        assert net.node.run(default_device, _OwnFiles()) == device  # type: ignore[arg-type]
        before = net.node.tc(f"qdisc show dev {device}")
        network = Network(str(tmp_path / "network-qos"))
        members: dict[Member, int] = {net.POD[0]: 0x38}
        changed = net.node.run(
            network.apply,
            net.node.index(device),
            classes=_CLASSES,
            default=0x18,
            members=members,
        )
        assert changed.problems == ()
        net.pod.run(_send, net.WORLD[0])
        wait_until(
            lambda: _sent(net.node, device, 0x38) > _DATAGRAMS * 1000, "the pod's packets are sent"
        )
        assert _sent(net.node, device, 0x18) < _DATAGRAMS * 1000
        assert net.node.run(network.remove)
        assert net.node.tc(f"qdisc show dev {device}") == before
        network.close()
