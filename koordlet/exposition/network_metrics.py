"""The series of network QoS, of our own: whether it is in force, and what the classes may send."""

from __future__ import annotations

from collections.abc import Iterator

from koordlet.exposition.strategy_metrics import Gauge
from koordlet.qos.network.classes import SHARED, name_of
from koordlet.qos.network.status import NetworkQosStatus


def of_network(status: NetworkQosStatus) -> Iterator[Gauge]:
    """Yield the series; those of the classes while some are in force. Rates in bits a second."""
    yield "network_qos_on", (), float(status.on)
    yield "network_qos_problems", (), float(len(status.problems))
    if not status.on or not status.classes:
        return
    leaves = [each for each in status.classes.values() if each.quantum]
    for each in leaves:
        if each.minor in SHARED:
            yield "network_qos_class_ceil_bits", (("class", name_of(each.minor)),), each.ceil * 8.0
    own = sum(each.minor not in SHARED for each in leaves)
    yield "network_qos_limited_pods", (), float(own)
    yield "network_qos_members", (), float(len(status.members))
