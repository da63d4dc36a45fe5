"""What cannot be used of an object is logged once, however many events come of the object."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from cluster.scheduler.process import SchedulerProcess
from kube.client import Client
from tests.cluster.scheduler.configuration.files import chart_file, load

Plain = dict[str, Any]
_DRIVERS = [{"name": f"d{n}", "nodeID": "n", "allocatable": {"count": 1}} for n in range(65)]
_GPU = {"type": "gpu", "minor": 0, "health": True, "resources": {}}
_OBJECTS: dict[str, tuple[Plain, int]] = {
    "devices": ({"metadata": {"name": "n"}, "spec": {"devices": [_GPU] * 20}}, 11),
    "csinodes": ({"metadata": {"name": "n"}, "spec": {"drivers": _DRIVERS}}, 1),
    "noderesourcetopologies": (
        {
            "metadata": {
                "name": "n",
                "annotations": {"node.koordinator.sh/cpu-topology": '{"detail":[{"id":-5}]}'},
            },
            "topologyPolicies": ["None"],
            "zones": [],
        },
        1,
    ),
    "podgroups": (
        {
            "metadata": {
                "name": "g",
                "namespace": "default",
                "annotations": {"gang.scheduling.koordinator.sh/groups": "x"},
            },
            "spec": {"minMember": 1},
        },
        1,
    ),
    "pods": (
        {
            "metadata": {
                "name": "p",
                "namespace": "default",
                "uid": "u",
                "annotations": {"scheduling.koordinator.sh/resource-status": "["},
            },
            "spec": {"nodeName": "n", "containers": []},
        },
        1,
    ),
    "elasticquotas": (
        {"metadata": {"name": "q", "namespace": "default"}, "spec": {"min": {"cpu": "-1"}}},
        1,
    ),
    "clusternetworktopologies": (
        {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": [{"labelKey": []}]}},
        1,
    ),
    "reservations": (
        {"metadata": {"name": "r", "uid": "r"}, "spec": {"ttl": "soon", "owners": [{}]}},
        2,
    ),
    "persistentvolumeclaims": (
        {"metadata": {"name": "c", "namespace": "default"}, "spec": {"resources": 7}},
        1,
    ),
}
"""Resource -> an object, and how many lines it may cost the log."""


def _line(plain: Plain, version: int) -> bytes:
    metadata = plain["metadata"] | {"resourceVersion": str(version)}
    metadata["labels"] = {"version": str(version)}
    return msgspec.json.encode({"type": "MODIFIED", "object": {**plain, "metadata": metadata}})


@pytest.mark.parametrize("plural", _OBJECTS)
def test_a_bad_object_is_named_once(plural: str, caplog: pytest.LogCaptureFixture) -> None:
    async def make() -> SchedulerProcess:
        return SchedulerProcess(cast(Client, None), load(chart_file()), seed=3)

    process = asyncio.run(make())
    plain, lines = _OBJECTS[plural]
    caches = {cache.resource.plural: cache for cache in (*process.caches, process.pods)}
    node = {"metadata": {"name": "n", "uid": "n"}, "status": {"allocatable": {"cpu": "4"}}}
    caches["nodes"].take(_line(node, 1))
    for version in range(2, 30):
        caches[plural].take(_line(plain, version))
    assert len(caplog.records) == lines, [each.getMessage() for each in caplog.records]
    assert not any(cache.faults.count for cache in caches.values())
    # When it is gone and comes back, it is named again.
    gone = msgspec.json.encode({"type": "DELETED", "object": plain | {"kind": "gone"}})
    caches[plural].take(gone)
    caches[plural].take(_line(plain, 31))
    assert len(caplog.records) == 2 * lines
