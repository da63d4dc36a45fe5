"""Host ports in use: which meet, and until when."""

from __future__ import annotations

import pytest

from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.ports import PortTable
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_pod

_SHAPES = Shapes()


def _shape(port: int = 80, address: str = "", protocol: str = "TCP") -> PodShape:
    ports = [{"containerPort": 1, "hostPort": port, "hostIP": address, "protocol": protocol}]
    return _SHAPES.of(make_pod("p", containers=[{"name": "c", "ports": ports}]))


def _booking(shape: PodShape) -> Booking:
    return Booking("default/p", "p", shape, "n")


@pytest.mark.parametrize(
    ("wanted", "meets"),
    [
        (_shape(address="10.0.0.1"), True),
        (_shape(address="10.0.0.2"), False),
        (_shape(address="0.0.0.0"), True),
        (_shape(), True),
        (_shape(81, "10.0.0.1"), False),
        (_shape(80, "10.0.0.1", "UDP"), False),
    ],
)
def test_ports_meet_where_protocol_and_address_do(wanted: PodShape, meets: bool) -> None:
    table = PortTable()
    table.place(_booking(_shape(address="10.0.0.1")), 3)
    assert table.conflicts(wanted.ports, 3) == meets
    assert not table.conflicts(wanted.ports, 4)
    (port,) = wanted.ports
    rows = list(table.rows_in_conflict(port.protocol, port.host_port, port.host_ip))
    assert rows == ([3] if meets else [])


def test_a_port_is_in_use_until_the_last_pod_with_it_is_gone() -> None:
    table, wanted = PortTable(), _shape().ports
    any_address, one = _booking(_shape()), _booking(_shape(address="10.0.0.1"))
    for booking in (any_address, any_address, one):
        table.place(booking, 0)
    table.place(any_address, 1)
    assert sorted(table.rows_in_conflict("TCP", 80, "")) == [0, 0, 1]
    table.remove(any_address, 0)
    table.remove(one, 0)
    assert table.conflicts(wanted, 0)
    table.remove(any_address, 0)
    assert not table.conflicts(wanted, 0) and table.conflicts(wanted, 1)
    assert list(table.rows_in_conflict("TCP", 80, "")) == [1]


def test_ports_of_pods_that_count_as_gone_are_free_unless_others_have_them_too() -> None:
    table, wanted = PortTable(), _shape().ports
    table.place(_booking(_shape()), 0)
    gone = _shape().ports
    assert not table.conflicts(wanted, 0, without=[gone])
    assert table.conflicts(wanted, 0, without=[_shape(81).ports])
    table.place(_booking(_shape()), 0)
    assert table.conflicts(wanted, 0, without=[gone])
    assert not table.conflicts(wanted, 0, without=[gone, gone])
