"""The series of network QoS."""

from __future__ import annotations

from koordlet.exposition.network_metrics import of_network
from koordlet.qos.network.classes import BE, LS, SYSTEM, group_of
from koordlet.qos.network.status import NetworkQosStatus
from linux.htb import HtbClass


def _class(minor: int, ceil: int, *, quantum: int = 1500) -> HtbClass:
    return HtbClass(minor, 0, ceil // 2, ceil, 0, 0, quantum)


def test_the_shared_classes_have_their_limits_in_bits_and_pods_are_counted() -> None:
    found = (
        _class(SYSTEM, 1000),
        _class(LS, 800),
        _class(BE, 400),
        _class(group_of(BE), 400, quantum=0),  # only holds others
        _class(0x1234, 10),  # a pod's own
    )
    status = NetworkQosStatus(
        on=True, classes={each.minor: each for each in found}, problems=("eth0: refused",)
    )
    assert list(of_network(status)) == [
        ("network_qos_on", (), 1.0),
        ("network_qos_problems", (), 1.0),
        ("network_qos_class_ceil_bits", (("class", "system"),), 8000.0),
        ("network_qos_class_ceil_bits", (("class", "ls"),), 6400.0),
        ("network_qos_class_ceil_bits", (("class", "be"),), 3200.0),
        ("network_qos_limited_pods", (), 1.0),
        ("network_qos_members", (), 0.0),
    ]


def test_while_it_is_off_nothing_is_said_about_classes() -> None:
    status = NetworkQosStatus(on=False, classes={SYSTEM: _class(SYSTEM, 1000)})
    assert [name for name, _, _ in of_network(status)] == [
        "network_qos_on",
        "network_qos_problems",
    ]
