"""CPUs, memory and devices of one pod on the same NUMA nodes, with a profile's plugins."""

from __future__ import annotations

import json

import pytest

from apis.keys import LABEL_NUMA_TOPOLOGY_POLICY
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import enabled, file
from tests.cluster.scheduler.devices.making import a_device_object, a_gpu, a_shape, full
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology


def _scheduling(*order: str) -> Scheduling:
    """Return a cluster of one node with 16 CPUs and 8 GPUs on two NUMA nodes."""
    plugins = {point: enabled(*order) for point in ("filter", "score", "reserve")}
    profile = {"schedulerName": "koord-scheduler", "plugins": plugins}
    text = json.dumps(file(profiles=[profile]))
    tables = Tables()
    made = make_plugins(read_configuration(text, obj="test"), tables)
    node = make_node(
        "n1",
        labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"},
        allocatable={full("gpu"): "800"},
    )
    row = tables.upsert_node(node)
    topology = make_topology("n1", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    facts, errors = parse_numa_facts(node, topology)
    assert not errors
    made.numa.set_node(row, facts)
    gpus = [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2])) for minor in range(8)]
    assert not made.devices.set_device(a_device_object("n1", gpus))
    return Scheduling(tables, made.profiles, seed=1)


@pytest.mark.parametrize(
    "order", [("NodeNUMAResource", "DeviceShare"), ("DeviceShare", "NodeNUMAResource")]
)
def test_gpus_lie_on_the_numa_node_of_the_cpus(order: tuple[str, ...]) -> None:
    scheduling = _scheduling(*order)

    def schedule(name: str, cpu: int, gpus: int) -> Placed | Unplaced:
        shape = a_shape({"cpu": cpu, "memory": "1Gi", "gpu": 100 * gpus})
        return scheduling.schedule(
            key=f"default/{name}", uid=name, shape=shape, profile="koord-scheduler", now=1
        )

    numa_of = []
    # The first pod leaves 1 CPU on its NUMA node, so the second one's GPUs come from the other one.
    for name, cpu, gpus in (("a", 7, 0), ("b", 4, 1), ("c", 4, 2), ("d", 1, 4)):
        placed = schedule(name, cpu, gpus)
        assert isinstance(placed, Placed), name
        allocation = placed.booking.allocation
        (numa,) = {node for node, _ in allocation.numa}
        assert {gpu.minor // 4 for gpu in allocation.devices.get("gpu", ())} <= {numa}
        numa_of.append(numa)
    assert numa_of == [0, 1, 1, 0]
    # One GPU is left, and no CPU on its NUMA node.
    assert isinstance(schedule("e", 1, 1), Unplaced)
