"""What columns decide about nodes is what the allocation finds, on random machines."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.exact.devices.allocate import allocate
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from tests.cluster.scheduler.devices.clusters import (
    a_cluster,
    reasons,
)
from tests.cluster.scheduler.devices.making import (
    a_booking,
    a_device_object,
    a_shape,
)
from tests.cluster.scheduler.devices.random_machines import AMOUNTS, EXTRA, machines
from tests.cluster.scheduler.making import make_node


@given(st.lists(machines(), min_size=1, max_size=3), AMOUNTS, EXTRA)
def test_the_mask_says_what_the_allocation_finds(
    cluster: list[dict[str, Any]], requests: dict[str, Any], extra: dict[str, Any]
) -> None:
    """Columns decide without allocating; they must agree with the allocation, node by node."""
    tables, devices = a_cluster()
    for number, machine in enumerate(cluster):
        name = f"n{number}"
        tables.upsert_node(make_node(name, labels=machine["labels"]))
        devices.set_device(a_device_object(name, machine["devices"]))
        for pod, (held, how) in enumerate(machine["held"]):
            shape = a_shape(held, **how)
            found = DeviceShareAllocator(devices).choose(shape, number)
            if machine["silent"] == pod:
                found = {}  # bound by another scheduler
            if not isinstance(found, Failure):
                tables.place(a_booking(f"{name}-{pod}", shape, name, found))
    shape = a_shape(requests, **extra)
    request = shape.derived(device_request)
    assert isinstance(request, DeviceRequest)
    for row, held_back in enumerate(reasons(shape, tables, devices)):
        view = devices.view(row)
        assert view is not None
        outcome = allocate(view, request)
        if isinstance(outcome, Failure):
            assert held_back, outcome
        else:
            assert not held_back, (held_back, outcome)
