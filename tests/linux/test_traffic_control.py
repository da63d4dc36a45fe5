"""Classes and members in the kernel, read by tc beside us, in network namespaces of our own."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linux.htb import MAJOR, ROOT, HtbClass, Shaping, ticks
from linux.netlink import Message, Netlink, NetlinkError
from linux.packet_classes import Group, Member, PacketClasses
from tests.beds.network import Namespace, device, require_shaping
from tests.conftest import require

pytestmark = pytest.mark.root

_NODE = HtbClass(0x1, 0, 50_000_000_000, 50_000_000_000, ticks(2000, 10**9), ticks(3000, 10**9))
_GROUP = HtbClass(0x10, 0x1, 1_000, 50_000_000_000, 500, 600)
_LEAF = HtbClass(0x18, 0x10, 2_000, 125_000, 700, 800, quantum=15_000, prio=2)


class Node:
    def __init__(self, namespace: Namespace, index: int) -> None:
        self.namespace = namespace
        self.index = index
        self.shaping = namespace.run(Shaping)
        self.packets = namespace.run(PacketClasses)

    def build(self) -> None:
        self.shaping.add_root(self.index, default=0x18)
        for each in (_NODE, _GROUP, _LEAF):
            self.shaping.add(self.index, each)


@pytest.fixture
def node() -> Iterator[Node]:
    require_shaping()
    with device() as (namespace, index):
        made = Node(namespace, index)
        yield made
        made.shaping.close()
        made.packets.close()


def test_classes_read_back_as_written_also_beyond_32_bits(node: Node) -> None:
    node.build()
    assert node.shaping.classes(node.index) == {each.minor: each for each in (_NODE, _GROUP, _LEAF)}
    shown = node.namespace.tc("class show dev eth0")
    assert "class htb 4b4f:1 root rate 400Gbit ceil 400Gbit" in shown
    assert "class htb 4b4f:18 parent 4b4f:10" in shown
    assert "prio 2 rate 16Kbit ceil 1Mbit" in shown


def test_a_class_changes_in_place_and_goes(node: Node) -> None:
    node.build()
    other = HtbClass(0x18, 0x10, 4_000, 5_000_000_000, 1, 2, quantum=30_000, prio=3)
    node.shaping.change(node.index, other)
    assert node.shaping.classes(node.index)[0x18] == other
    node.shaping.delete(node.index, 0x18)
    assert set(node.shaping.classes(node.index)) == {0x1, 0x10}


def test_the_kernels_default_returns(node: Node) -> None:
    before = node.namespace.tc("qdisc show dev eth0")
    node.build()
    (ours,) = node.shaping.qdiscs(node.index)
    assert ours.ours and ours.parent == ROOT
    node.shaping.delete_root(node.index)
    assert node.namespace.tc("qdisc show dev eth0") == before


def test_anothers_root_is_not_replaced(node: Node) -> None:
    node.namespace.tc("qdisc add dev eth0 root handle 8001: pfifo limit 17")
    with pytest.raises(NetlinkError) as refused:
        node.shaping.add_root(node.index, default=0x18)
    assert refused.value.errno == errno.EEXIST
    assert "pfifo 8001: root" in node.namespace.tc("qdisc show dev eth0")


def test_a_refusal_has_the_kernels_words(node: Node) -> None:
    node.namespace.tc("qdisc add dev eth0 root handle 8001: pfifo limit 17")
    with pytest.raises(NetlinkError, match="NLM_F_REPLACE needed to override"):
        node.shaping.add_root(node.index, default=0x18)


def test_our_qdisc_is_found_on_other_devices_too(node: Node) -> None:
    node.build()
    far = node.namespace.index("far")
    assert [each.index for each in node.shaping.qdiscs(far) if each.ours] == [node.index]


def test_members_change_and_go(node: Node) -> None:
    packets = node.packets
    assert packets.read() is None
    packets.install({"10.0.0.1": 0x28, "fd00::1": 0x38})
    assert packets.read() == ({"10.0.0.1": 0x28, "fd00::1": 0x38}, frozenset())
    many: dict[Member, int] = {f"10.1.{number >> 8}.{number & 255}": 0x28 for number in range(600)}
    packets.change(many | {"10.0.0.1": 0x38}, ["10.0.0.1", "fd00::1"])
    assert packets.read() == (many | {"10.0.0.1": 0x38}, frozenset())
    packets.install({})
    assert packets.read() == ({}, frozenset())
    assert packets.remove() and not packets.remove()
    assert packets.read() is None


def test_a_refused_transaction_changes_nothing(node: Node) -> None:
    node.packets.install({"10.0.0.1": 0x28})
    with pytest.raises(NetlinkError):
        node.packets.change({"10.0.0.2": 0x28}, ["10.0.0.9"])
    assert node.packets.read() == ({"10.0.0.1": 0x28}, frozenset())


def test_groups_are_members_too_each_level_with_a_map_of_its_own(node: Node) -> None:
    members: dict[Member, int] = {Group(3, 77): 0x28, Group(2, 1 << 40): 0x38, "10.0.0.1": 0x28}
    try:
        node.packets.install(members)
    except NetlinkError as error:
        require(False, f"needs a kernel with nft_socket and its cgroups: {error}", tier="vm")
    assert node.packets.read() == (members, frozenset({2, 3}))
    node.packets.change({Group(3, 78): 0x38}, [Group(3, 77)])
    assert node.packets.read() == (
        {Group(3, 78): 0x38, Group(2, 1 << 40): 0x38, "10.0.0.1": 0x28},
        frozenset({2, 3}),
    )
    node.packets.install({"10.0.0.1": 0x28})
    assert node.packets.read() == ({"10.0.0.1": 0x28}, frozenset())


def test_a_table_that_lacks_a_rule_is_not_ours_as_it_should_be(node: Node) -> None:
    node.packets.install({"10.0.0.1": 0x28})
    flush_rules = Message(10 << 8 | 8, 0x4, bytes([1, 0, 0, 0]) + _text(1, "koordlet-network"))
    border = bytes([0, 0, 0, 10])
    with_netfilter = node.namespace.run(Netlink, 12)
    with_netfilter.send([Message(16, 0, border), flush_rules, Message(17, 0, border)])
    with_netfilter.close()
    assert node.packets.read() is None
    node.packets.install({"10.0.0.1": 0x28})
    assert node.packets.read() == ({"10.0.0.1": 0x28}, frozenset())


def test_a_refused_request_does_not_spoil_the_next(node: Node) -> None:
    for _ in range(3):
        with pytest.raises(NetlinkError):
            node.shaping.delete(node.index, 0x99)
        assert node.shaping.qdiscs(node.index)[0].handle == 0


@given(st.integers(1, 1 << 20), st.integers(1_000, 1 << 40))
def test_a_burst_is_never_negative_nor_beyond_the_field(burst: int, rate: int) -> None:
    assert 0 <= ticks(burst, rate) < 1 << 32


def test_our_handle_is_a_valid_one() -> None:
    # 0 is the kernel's, ffff is for what comes in, and from 8000 on the kernel counts itself.
    assert 0 < MAJOR < 0x8000


def _text(kind: int, value: str) -> bytes:
    content = value.encode() + b"\0"
    length = 4 + len(content)
    return length.to_bytes(2, "little") + kind.to_bytes(2, "little") + content + bytes(-length % 4)
