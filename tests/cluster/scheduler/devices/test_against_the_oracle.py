"""Reasons, scores, chosen devices and virtual functions are those of a slow, obvious oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from apis.keys import LABEL_GPU_MODEL, LABEL_GPU_PARTITION_POLICY
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareScore
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices import oracle
from tests.cluster.scheduler.devices.clusters import a_cluster, reasons
from tests.cluster.scheduler.devices.making import a_booking, a_device_object, a_shape
from tests.cluster.scheduler.devices.random_machines import AMOUNTS, EXTRA, machines
from tests.cluster.scheduler.making import make_node

Given = dict[str, list[tuple[int, str, dict[str, int]]]]
"""By type: minor, virtual function or "", amounts."""


@dataclass(frozen=True)
class _Cluster:
    tables: Tables
    devices: DeviceTable
    nodes: list[oracle.Node]


def _cluster(machines: list[dict[str, Any]]) -> _Cluster:
    """Return the machines with their pods, in the tables and for the oracle."""
    tables, devices = a_cluster()
    nodes = []
    for row, machine in enumerate(machines):
        name, labels = f"n{row}", machine["labels"]
        tables.upsert_node(make_node(name, labels=labels))
        devices.set_device(a_device_object(name, machine["devices"]))
        pods: list[tuple[DeviceRequest, Devices]] = []
        for number, (held, how) in enumerate(machine["held"]):
            shape = a_shape(held, **how)
            found = DeviceShareAllocator(devices).choose(shape, row)
            if machine["silent"] == number:
                found = {}  # bound by another scheduler
            if not isinstance(found, Failure):
                tables.place(a_booking(f"{name}-{number}", shape, name, found))
                pods.append((_request(shape), found))
        nodes.append(
            oracle.node_of(
                machine["devices"],
                pods,
                partitions=LABEL_GPU_MODEL in labels,
                honor=LABEL_GPU_PARTITION_POLICY in labels,
            )
        )
    return _Cluster(tables, devices, nodes)


def _request(shape: PodShape) -> DeviceRequest:
    request = shape.derived(device_request)
    assert isinstance(request, DeviceRequest)
    return request


def _chosen(found: Devices | Failure) -> Given | oracle.Failed:
    if isinstance(found, Failure):
        return oracle.Failed(found.text, found.resolvable)
    return {
        str(type_): [
            (
                one.minor,
                one.extension.vfs[0].bus_id if one.extension is not None else "",
                {name: quantity.value() for name, quantity in one.resources.items()},
            )
            for one in each
        ]
        for type_, each in found.items()
    }


def _expected(node: oracle.Node, request: DeviceRequest) -> Given | oracle.Failed:
    found = oracle.decide(node, request)
    if isinstance(found, oracle.Failed):
        return found
    return {
        str(type_): [
            (one.minor, one.function(request.types[type_]), one.takes(request.types[type_]))
            for one in each
        ]
        for type_, each in found.items()
    }


@given(st.lists(machines(), min_size=1, max_size=3), AMOUNTS, EXTRA)
def test_a_node_gives_the_devices_that_the_oracle_gives_or_fails_with_its_reason(
    machines: list[dict[str, Any]], requests: dict[str, Any], extra: dict[str, Any]
) -> None:
    cluster = _cluster(machines)
    shape = a_shape(requests, **extra)
    request = _request(shape)
    masks = reasons(shape, cluster.tables, cluster.devices)
    for row, (node, held_back) in enumerate(zip(cluster.nodes, masks, strict=True)):
        expected = _expected(node, request)
        assert _chosen(DeviceShareAllocator(cluster.devices).choose(shape, row)) == expected
        shown = {oracle.Failed(reason.text, reason.resolvable) for reason in held_back}
        if isinstance(expected, oracle.Failed):
            # Columns look at all types, and name what is missing of each.
            assert expected in shown
        else:
            assert not shown


@given(st.lists(machines(), min_size=1, max_size=3), AMOUNTS, EXTRA)
def test_nodes_that_pass_are_ranked_as_the_oracle_ranks_them(
    machines: list[dict[str, Any]], requests: dict[str, Any], extra: dict[str, Any]
) -> None:
    cluster = _cluster(machines)
    shape = a_shape(requests, **extra)
    rows = np.arange(len(machines), dtype=np.intp)
    scores = DeviceShareScore(cluster.devices).score(shape, cluster.tables, rows)
    for score, node in zip(scores.tolist(), cluster.nodes, strict=True):
        if not isinstance(oracle.decide(node, _request(shape)), oracle.Failed):
            assert score == oracle.node_score(node, _request(shape))
