"""Clusters of nodes with devices, and what DeviceShare says about a pod there."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.devices.settings import Settings
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices.making import (
    a_booking,
    a_device_object,
    a_gpu,
    a_shape,
    full,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node


def a_cluster(**nodes: list[dict[str, Any]] | None) -> tuple[Tables, DeviceTable]:
    """Return a cluster of these nodes; None stands for a node without a Device."""
    tables = Tables()
    devices = DeviceTable(tables.nodes)
    tables.add_part(devices)
    for name, of_node in nodes.items():
        tables.upsert_node(make_node(name))
        if of_node is not None:
            devices.set_device(a_device_object(name, of_node))
    return tables, devices


def eight(*, at: bool = False) -> list[dict[str, Any]]:
    return [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2]) if at else None) for minor in range(8)]


def hold(tables: Tables, node: str, *gpus: int) -> None:
    """Give whole GPUs of a node to a pod."""
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    allocated = {"gpu": [{"minor": minor, "resources": resources} for minor in gpus]}
    shape = a_shape({"gpu": 100 * len(gpus)})
    tables.place(a_booking(f"on-{node}-{gpus}", shape, node, parsed_allocation(allocated)))


def reasons(
    shape: PodShape,
    tables: Tables,
    devices: DeviceTable,
    arguments: Settings = Settings(),  # noqa: B008 - frozen
) -> list[list[Reason]]:
    """Return what holds each row back."""
    plugin = DeviceShareFilter(devices, arguments)
    if not plugin.applies(shape, tables):
        return [[] for _ in range(len(tables.nodes))]
    known = plugin.reasons(shape)
    assert len(known) <= 62
    mask = plugin.filter(shape, tables, slice(0, len(tables.nodes)))
    each = [
        int(plugin.filter(shape, tables, np.array([row], dtype=np.intp))[0])
        for row in range(len(tables.nodes))
    ]
    assert mask.tolist() == each  # one row alone gives what it gives among all
    return [[known[bit] for bit in range(len(known)) if value >> bit & 1] for value in each]


def texts(*args: Any) -> list[list[str]]:
    return [sorted({reason.text for reason in found}) for found in reasons(*args)]


def a_scheduling(tables: Tables, devices: DeviceTable, **arguments: Any) -> Scheduling:
    settings = Settings(**arguments)
    profile = Profile(
        "koord-scheduler",
        filters=(DeviceShareFilter(devices, settings),),
        scores=((DeviceShareScore(devices, settings), 1),),
        allocators=(DeviceShareAllocator(devices, settings),),
    )
    return Scheduling(tables, {"koord-scheduler": profile}, seed=1)


def schedule(scheduling: Scheduling, name: str, shape: PodShape) -> Placed | Unplaced:
    return scheduling.schedule(
        key=f"default/{name}", uid=name, shape=shape, profile="koord-scheduler", now=1.5e9
    )
