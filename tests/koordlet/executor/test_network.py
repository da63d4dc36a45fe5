"""From the classes in the kernel to the wanted ones: order, what is not ours, and real packets."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.executor.network import Network, Occupied, Operation, steps
from linux.htb import HtbClass, Shaping, ticks
from linux.netlink import ACK, NETFILTER, Message, Netlink
from linux.packet_classes import Group, Member, PacketClasses
from tests.beds.network import Namespace, Routed, device, namespace, require_shaping, routed
from tests.conftest import require
from tests.waiting import wait_until


def _class(minor: int, parent: int, rate: int = 1_000_000, **other: Any) -> HtbClass:
    return HtbClass(minor, parent, rate, rate, ticks(2000, rate), ticks(2000, rate), **other)


_NODE = _class(0x1, 0, 125_000_000)
_GROUP = _class(0x10, 0x1, 125_000_000)
_SHARED = _class(0x18, 0x10, 125_000_000, quantum=15_000)
_OWN = _class(0x108, 0x10, quantum=15_000)
_BASE = (_NODE, _GROUP, _SHARED)


# --- the steps ---------------------------------------------------------------------------------


@st.composite
def _trees(draw: st.DrawFn) -> list[HtbClass]:
    """Trees of classes, parents first."""
    made: list[HtbClass] = []
    for minor in draw(st.lists(st.integers(1, 12), unique=True, max_size=10)):
        parent = draw(st.sampled_from([0, *(each.minor for each in made)]))
        made.append(_class(minor, parent, draw(st.sampled_from([1_000, 2_000]))))
    return made


@given(_trees(), _trees())
def test_steps_lead_to_what_is_wanted_as_the_kernel_allows(
    present: list[HtbClass], wanted: list[HtbClass]
) -> None:
    kernel = {each.minor: each for each in present}
    for step in [step for part in steps(kernel, wanted) for step in part]:
        each = step.each
        if step.operation is Operation.DELETE:
            assert all(other.parent != each.minor for other in kernel.values())
            del kernel[each.minor]
            continue
        assert each.parent == 0 or each.parent in kernel
        if step.operation is Operation.ADD:
            assert each.minor not in kernel
        else:
            assert kernel[each.minor].parent == each.parent
        kernel[each.minor] = each
    assert kernel == {each.minor: each for each in wanted}


@given(_trees())
def test_equal_trees_need_no_step(tree: list[HtbClass]) -> None:
    assert steps({each.minor: each for each in tree}, tree) == ([], [])


# --- the kernel --------------------------------------------------------------------------------


class Bed:
    """A namespace with eth0, and the effector in it."""

    def __init__(self, node: Namespace, index: int, marker: Path) -> None:
        self.node = node
        self.index = index
        self.marker = marker
        self.network = Network(str(marker))

    def apply(self, *classes: HtbClass, members: Mapping[Member, int] | None = None) -> int:
        """Apply; return the number of writes. The kernel must refuse nothing."""
        changed = self.node.run(
            self.network.apply,
            self.index,
            classes=classes,
            default=0x18,
            members=members or {},
        )
        assert changed.problems == ()
        return changed.writes

    @property
    def qdisc(self) -> str:
        shown = self.node.tc("qdisc show dev eth0")
        return re.sub(r"direct_packets_stat \d+", "", shown)  # a count

    @property
    def classes(self) -> dict[int, HtbClass]:
        return self.node.run(_read_classes, self.index)

    @property
    def members(self) -> dict[Member, int] | None:
        return self.node.run(_read_members)


def _read_classes(index: int) -> dict[int, HtbClass]:
    shaping = Shaping()
    try:
        return shaping.classes(index)
    finally:
        shaping.close()


def _read_members() -> dict[Member, int] | None:
    packets = PacketClasses()
    try:
        present = packets.read()
        return None if present is None else present.members
    finally:
        packets.close()


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    require_shaping()
    with device() as (node, index):
        made = Bed(node, index, tmp_path / "network-qos")
        yield made
        made.network.close()


@pytest.mark.root
def test_applied_once_and_then_left_alone(bed: Bed) -> None:
    default = bed.qdisc
    members: dict[Member, int] = {"10.0.0.1": 0x108, "fd00::1": 0x108}
    assert bed.apply(*_BASE, _OWN, members=members) == 1 + 4 + 2
    assert bed.classes == {each.minor: each for each in (*_BASE, _OWN)}
    assert bed.members == members
    assert bed.apply(*_BASE, _OWN, members=members) == 0
    assert bed.node.run(bed.network.remove)
    assert bed.qdisc == default and bed.members is None
    assert not bed.node.run(bed.network.remove)


@pytest.mark.root
def test_only_the_difference_is_written(bed: Bed) -> None:
    bed.apply(*_BASE, _OWN, members={"10.0.0.1": 0x108, "10.0.0.2": 0x18})
    faster = _class(0x108, 0x10, 2_000_000, quantum=15_000)
    assert bed.apply(*_BASE, faster, members={"10.0.0.1": 0x108, "10.0.0.2": 0x18}) == 1
    assert bed.apply(*_BASE, members={"10.0.0.2": 0x18, "10.0.0.3": 0x18}) == 1 + 2
    assert bed.members == {"10.0.0.2": 0x18, "10.0.0.3": 0x18}
    assert bed.classes == {each.minor: each for each in _BASE}


@pytest.mark.root
def test_what_others_changed_is_repaired(bed: Bed) -> None:
    bed.apply(*_BASE, members={"10.0.0.1": 0x18})
    bed.node.tc("class change dev eth0 parent 4b4f:10 classid 4b4f:18 htb rate 1mbit")
    bed.node.tc("class add dev eth0 parent 4b4f:1 classid 4b4f:99 htb rate 1mbit")
    bed.node.run(_without_table)
    assert bed.apply(*_BASE, members={"10.0.0.1": 0x18}) == 2 + 1
    assert bed.classes == {each.minor: each for each in _BASE}
    assert bed.members == {"10.0.0.1": 0x18}


@pytest.mark.root
@pytest.mark.parametrize(
    "command",
    [
        "qdisc add dev eth0 root handle 8001: pfifo limit 17",
        "qdisc add dev eth0 root handle 1: htb default 2",
    ],
)
def test_anothers_qdisc_stays(bed: Bed, command: str) -> None:
    bed.node.tc(command)
    before = bed.qdisc
    with pytest.raises(Occupied, match=r"(pfifo 8001|htb 1): was set by another program"):
        bed.apply(*_BASE)
    assert not bed.node.run(bed.network.remove)
    assert bed.qdisc == before


@pytest.mark.root
def test_an_ingress_qdisc_and_one_below_our_class_do_not_hinder(bed: Bed) -> None:
    bed.node.tc("qdisc add dev eth0 ingress")
    bed.apply(*_BASE)
    bed.node.tc("qdisc add dev eth0 parent 4b4f:18 handle 20: pfifo limit 17")
    assert bed.apply(*_BASE) == 0
    assert "pfifo 20: parent 4b4f:18" in bed.qdisc
    bed.node.run(bed.network.remove)
    assert "ingress" in bed.qdisc


@pytest.mark.root
def test_another_device_takes_over(bed: Bed) -> None:
    default = bed.qdisc
    bed.apply(*_BASE)
    bed.index = bed.node.index("far")
    bed.apply(*_BASE)
    assert bed.qdisc == default
    assert "htb 4b4f: root" in bed.node.tc("qdisc show dev far")


@pytest.mark.root
def test_a_device_that_vanished_and_returned(bed: Bed) -> None:
    bed.apply(*_BASE, members={"10.0.0.1": 0x18})
    bed.node.ip("link del eth0")
    with pytest.raises(OSError):
        bed.apply(*_BASE, members={"10.0.0.1": 0x18})
    bed.node.ip("link add name eth0 type veth peer name far")
    bed.index = bed.node.index("eth0")
    assert bed.apply(*_BASE, members={"10.0.0.1": 0x18}) == 1 + 3
    assert bed.classes == {each.minor: each for each in _BASE}


@pytest.mark.root
def test_a_refused_class_does_not_keep_the_others_out(bed: Bed) -> None:
    refused = HtbClass(0x208, 0x10, 0, 0, 1, 1, quantum=15_000)  # the kernel takes no rate of 0
    changed = bed.node.run(
        bed.network.apply,
        bed.index,
        classes=[*_BASE, refused, _OWN],
        default=0x18,
        members={"10.0.0.1": 0x108},
    )
    (problem,) = changed.problems
    assert problem.startswith("the kernel refuses to add class 208: ")
    assert set(bed.classes) == {0x1, 0x10, 0x18, 0x108}
    assert bed.members == {"10.0.0.1": 0x108}


class _Killed(BaseException):
    pass


class _Dying:
    """The methods of the wrapped one, of which the given call of one that changes ends us."""

    def __init__(self, wrapped: object, countdown: list[int]) -> None:
        self._wrapped = wrapped
        self._countdown = countdown

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._wrapped, name)
        if name not in ("add_root", "add", "change", "delete", "install"):
            return method  # type: ignore[no-any-return]

        def call(*args: Any, **kwargs: Any) -> Any:
            self._countdown[0] -= 1
            if self._countdown[0] < 0:
                raise _Killed
            return method(*args, **kwargs)

        return call


@pytest.mark.root
@pytest.mark.parametrize("after", range(6))
def test_a_kill_at_any_point_is_mended_by_the_next_run(bed: Bed, after: int) -> None:
    default = bed.qdisc
    countdown = [after]

    def shaping() -> Any:
        return _Dying(Shaping(), countdown)

    def packets() -> Any:
        return _Dying(PacketClasses(), countdown)

    dying = Network(str(bed.marker), shaping, packets)
    members: dict[Member, int] = {"10.0.0.1": 0x108}
    with pytest.raises(_Killed):
        bed.node.run(dying.apply, bed.index, classes=[*_BASE, _OWN], default=0x18, members=members)
    dying.close()
    bed.apply(*_BASE, _OWN, members=members)
    assert bed.classes == {each.minor: each for each in (*_BASE, _OWN)}
    assert bed.members == members
    # The same from the middle of it, by `koordlet restore`.
    bed.node.run(bed.network.remove)
    assert bed.qdisc == default and bed.members is None


# --- packets -----------------------------------------------------------------------------------

_LIMIT = 1_000_000
"""Bytes per second of the limited pod: 8 Mbit/s."""
_AMOUNT = 1_000_000


@pytest.fixture
def net() -> Iterator[Routed]:
    require_shaping()
    with routed() as made:
        yield made


def _shape(net: Routed, marker: Path) -> None:
    """POD has the limit, OTHER is in the shared class; everything else too."""
    limited = _class(0x108, 0x10, _LIMIT, quantum=15_000)
    unlimited = _class(0x208, 0x10, 125_000_000, quantum=15_000)
    network = Network(str(marker))
    members: dict[Member, int] = dict.fromkeys(net.POD, 264)
    members |= dict.fromkeys(net.OTHER, 520)
    changed = net.node.run(
        network.apply,
        net.node.index("eth0"),
        classes=[*_BASE, limited, unlimited],
        default=0x18,
        members=members,
    )
    assert changed.problems == ()
    network.close()


def _sent(net: Routed) -> dict[str, int]:
    """Return the bytes that each class sent, by its name."""
    words = net.node.tc("-s class show dev eth0").split()
    return {
        words[at + 2]: int(words[words.index("Sent", at) + 1])
        for at, word in enumerate(words)
        if word == "class"
    }


def _seconds(net: Routed, sender: Namespace, family: socket.AddressFamily) -> float:
    """Send `_AMOUNT` bytes from a pod to the world; return how long it took."""
    address = net.WORLD[family == socket.AF_INET6]
    listening = net.world.run(_listen, family, address)
    received = net.world.start(_receive, listening)
    began = time.monotonic()
    sender.run(_send, family, listening.getsockname())
    assert received.result(timeout=60) == _AMOUNT
    return time.monotonic() - began


def _listen(family: socket.AddressFamily, address: str) -> socket.socket:
    made = socket.socket(family)
    made.settimeout(30)
    made.bind((address, 0))
    made.listen()
    return made


def _receive(listening: socket.socket) -> int:
    connection, _ = listening.accept()
    listening.close()
    total = 0
    with connection:
        connection.settimeout(30)
        while part := connection.recv(1 << 16):
            total += len(part)
    return total


def _send(family: socket.AddressFamily, to: Any) -> None:
    with socket.socket(family) as sending:
        sending.settimeout(30)
        sending.connect(to)
        sending.sendall(bytes(_AMOUNT))


@pytest.mark.root
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_a_pod_keeps_to_its_limit_and_others_do_not_have_it(
    net: Routed, family: socket.AddressFamily, tmp_path: Path
) -> None:
    _shape(net, tmp_path / "network-qos")
    limited = _seconds(net, net.pod, family)
    before = _sent(net)
    free = _seconds(net, net.other, family)
    after = _sent(net)
    # A busy machine makes both longer, never shorter.
    assert limited > _AMOUNT / _LIMIT / 2
    assert free < limited
    assert before["4b4f:108"] > _AMOUNT > before["4b4f:208"]
    assert after["4b4f:208"] > _AMOUNT
    assert after["4b4f:108"] - before["4b4f:108"] < _AMOUNT / 100, "all but the connection's end"


@pytest.mark.root
def test_packets_that_leave_under_the_nodes_address_still_count_as_the_pods(
    net: Routed, tmp_path: Path
) -> None:
    _shape(net, tmp_path / "network-qos")
    net.node.run(_masquerade)
    _seconds(net, net.other, socket.AF_INET)
    sent = _sent(net)
    assert sent["4b4f:208"] > _AMOUNT > sent["4b4f:18"]


@pytest.mark.root
def test_the_nodes_own_packets_are_in_the_default_class(net: Routed, tmp_path: Path) -> None:
    _shape(net, tmp_path / "network-qos")
    _seconds(net, net.node, socket.AF_INET)
    sent = _sent(net)
    assert sent["4b4f:18"] > _AMOUNT > sent["4b4f:108"] + sent["4b4f:208"]


@pytest.mark.root
def test_processes_on_the_nodes_network_are_distinguished_by_their_group(
    net: Routed, tmp_path: Path
) -> None:
    with _group() as group:
        network = Network(str(tmp_path / "network-qos"))
        index = net.node.index("eth0")
        own = _class(0x108, 0x10, 125_000_000, quantum=15_000)
        changed = net.node.run(
            network.apply,
            index,
            classes=[*_BASE, own],
            default=0x18,
            members={Group(1, group.stat().st_ino): 0x108},
        )
        require(not changed.problems, f"needs nft_socket with cgroups: {changed.problems}")
        net.node.run(_datagrams, group, net.WORLD[0])
        # Packets that wait for their turn are not counted as sent yet.
        wait_until(lambda: _sent(net)["4b4f:108"] > 50 * 1000, "the group's packets are sent")
        inside = _sent(net)
        net.node.run(_datagrams, None, net.WORLD[0])
        wait_until(lambda: _sent(net)["4b4f:18"] > 50 * 1000, "the other packets are sent")
        outside = _sent(net)
        network.close()
    assert inside["4b4f:18"] < 10 * 1000
    assert outside["4b4f:108"] - inside["4b4f:108"] < 20 * 1000, "at most the rest of the first"


@contextmanager
def _group() -> Iterator[Path]:
    """A group of our own next to the root of cgroup v2, also where that has no controllers."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    root = next((line.split()[1] for line in mounts if line.split()[2] == "cgroup2"), "")
    require(root, "needs a cgroup v2 hierarchy, with or without controllers")
    made = Path(root, f"koord-test-network-{os.getpid()}")
    made.mkdir()
    try:
        yield made
    finally:
        made.rmdir()


_SENDS = """
import os, socket, sys
if sys.argv[1]:
    with open(sys.argv[1] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(60):
    sending.sendto(bytes(1000), (sys.argv[2], 9))
"""


def _datagrams(group: Path | None, to: str) -> None:
    """Send from a process in the group."""
    subprocess.run([sys.executable, "-c", _SENDS, str(group or ""), to], check=True, timeout=30)


class _WithoutGroups(PacketClasses):
    """A kernel that does not know groups."""

    def install(self, classes: Mapping[Member, int]) -> None:
        if any(isinstance(each, Group) for each in classes):
            raise OSError(errno.ENOENT, "No such file or directory")
        super().install(classes)


@pytest.mark.root
def test_a_kernel_without_groups_still_classifies_by_address(bed: Bed) -> None:
    network = Network(str(bed.marker), packets=_WithoutGroups)
    for address in ("10.0.0.1", "10.0.0.2"):
        changed = bed.node.run(
            network.apply,
            bed.index,
            classes=_BASE,
            default=0x18,
            members={Group(2, 5): 0x18, address: 0x18},
        )
        (problem,) = changed.problems
        assert problem.startswith("1 pods on the node's network are in class system")
        assert bed.members == {address: 0x18}
    network.close()


def _attribute(kind: int, content: bytes) -> bytes:
    length = 4 + len(content)
    return struct.pack("=HH", length, kind) + content + bytes(-length % 4)


def _nftables(*messages: tuple[int, int, bytes]) -> None:
    """Change tables of IPv4 in this thread's namespace: (kind, flags, attributes)."""
    netlink = Netlink(NETFILTER)
    border = bytes([0, 0, 0, 10])
    try:
        netlink.send(
            [
                Message(16, 0, border),
                *(
                    Message(10 << 8 | kind, flags | ACK, bytes([family, 0, 0, 0]) + body)
                    for kind, flags, body in messages
                    for family in [1 if body.startswith(_OURS) else 2]
                ),
                Message(17, 0, border),
            ]
        )
    finally:
        netlink.close()


_OURS = _attribute(1, b"koordlet-network\0")


def _without_table() -> None:
    _nftables((2, 0, _OURS))


def _masquerade() -> None:
    """Translate the address of everything that leaves by the node's."""
    table, chain = b"test-nat\0", b"out\0"
    hook = _attribute(1, struct.pack("!i", 4)) + _attribute(2, struct.pack("!i", 100))
    expression = _attribute(1, _attribute(1, b"masq\0"))
    _nftables(
        (0, 0x400, _attribute(1, table)),
        (
            3,
            0x400,
            _attribute(1, table)
            + _attribute(3, chain)
            + _attribute(4 | 0x8000, hook)
            + _attribute(7, b"nat\0"),
        ),
        (
            6,
            0x400 | 0x800,
            _attribute(1, table) + _attribute(2, chain) + _attribute(4 | 0x8000, expression),
        ),
    )


@pytest.mark.root
def test_what_is_in_force_is_reported_with_the_changes(bed: Bed) -> None:
    refused = HtbClass(0x208, 0x10, 0, 0, 1, 1, quantum=15_000)
    changed = bed.node.run(
        bed.network.apply,
        bed.index,
        classes=[*_BASE, refused],
        default=0x18,
        members={"10.0.0.1": 0x18},
    )
    assert changed.classes_in_force == bed.classes == {each.minor: each for each in _BASE}
    assert changed.members_in_force == bed.members == {"10.0.0.1": 0x18}


@pytest.mark.root
def test_a_look_writes_nothing(bed: Bed) -> None:
    default = bed.qdisc
    found = bed.node.run(bed.network.look, bed.index, classes=_BASE)
    assert not found.root and [step.each for step in found.first] == list(_BASE)
    assert bed.qdisc == default and bed.members is None and not bed.marker.exists()


class _WithoutTables(PacketClasses):
    """A kernel without nf_tables."""

    def read(self) -> Any:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def remove(self) -> bool:
        return bool(self.read())


@pytest.mark.root
def test_a_kernel_without_nftables_gets_its_default_back(bed: Bed) -> None:
    default = bed.qdisc
    network = Network(str(bed.marker), packets=_WithoutTables)
    changed = bed.node.run(
        network.apply, bed.index, classes=_BASE, default=0x18, members={"10.0.0.1": 0x18}
    )
    (problem,) = changed.problems
    assert problem == "packets cannot be classified with nftables: Operation not supported"
    assert changed.members_in_force == {} and bed.qdisc != default
    assert bed.node.run(network.remove)
    assert bed.qdisc == default and not bed.marker.exists()
    network.close()


class _RefusingTables(PacketClasses):
    """A kernel that does not remove the table."""

    def remove(self) -> bool:
        raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.root
def test_the_classes_go_also_where_the_table_stays(bed: Bed) -> None:
    default = bed.qdisc
    bed.apply(*_BASE)
    network = Network(str(bed.marker), packets=_RefusingTables)
    with pytest.raises(OSError, match="not permitted"):
        bed.node.run(network.remove)
    assert bed.qdisc == default and bed.marker.exists()
    network.close()


def test_nothing_is_opened_before_it_is_used(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise AssertionError("opened")

    network = Network(str(tmp_path / "network-qos"), refuse, refuse)
    assert not network.applied
    network.close()


@pytest.mark.root
def test_the_marker_stands_while_something_may_be_in_the_kernel(bed: Bed) -> None:
    bed.node.tc("qdisc add dev eth0 root handle 8001: pfifo")
    with pytest.raises(Occupied):
        bed.apply(*_BASE)
    assert Network(str(bed.marker)).applied
    assert not bed.node.run(bed.network.remove)
    assert not bed.marker.exists()


@pytest.mark.root
def test_nothing_is_changed_where_no_marker_can_be_made(bed: Bed) -> None:
    default = bed.qdisc
    bed.marker.mkdir()
    with pytest.raises(OSError):
        bed.apply(*_BASE)
    assert bed.qdisc == default and bed.members is None


@pytest.mark.root
def test_a_node_without_anything_of_ours_is_left_alone(tmp_path: Path) -> None:
    require_shaping()
    with namespace() as node:
        network = Network(str(tmp_path / "network-qos"))
        assert not node.run(network.remove)
        network.close()
