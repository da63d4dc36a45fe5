"""Every field of every kind of object with values that do not belong there: no fault, and in the
end a pod is placed as if nothing had been.

About 3 s: some 3,000 events, each with a decision about a pod that looks at the object.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec
import pytest

from benchmarks.soak_kinds import device, reservation, topology
from cluster.scheduler.binding.placement import Bound
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client
from tests.cluster.scheduler.configuration.files import chart_file, load

Plain = dict[str, Any]
Path = tuple[str | int, ...]

_AMOUNTS = {"cpu": "16", "memory": "64Gi", "pods": "110", "koordinator.sh/gpu-core": "400"}
_TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "b"}}}
_USAGE = {"resources": {"cpu": "1", "memory": "1Gi"}}
_PREFIX = "scheduling.koordinator.sh"
_OBJECTS: dict[str, Plain] = {
    "nodes": {
        "metadata": {
            "name": "n",
            "labels": {"zone": "a"},
            "annotations": {
                "node.koordinator.sh/reservation": '{"resources":{"cpu":"1"}}',
                f"{_PREFIX}/usage-thresholds": '{"usageThresholds":{"cpu":60}}',
            },
        },
        "spec": {"taints": [{"key": "a", "value": "b", "effect": "PreferNoSchedule"}]},
        "status": {"allocatable": _AMOUNTS, "images": [{"names": ["x"], "sizeBytes": 1}]},
    },
    "noderesourcetopologies": topology(0, "n"),
    "devices": device("n"),
    "nodemetrics": {
        "metadata": {"name": "n"},
        "status": {
            "updateTime": "2027-01-15T08:00:00Z",
            "nodeMetric": {"nodeUsage": _USAGE},
            "podsMetric": [{"name": "p", "namespace": "default", "podUsage": _USAGE}],
        },
    },
    "elasticquotas": {
        "metadata": {
            "name": "q",
            "namespace": "other",
            "labels": {"quota.scheduling.koordinator.sh/parent": "koordinator-root-quota"},
            "annotations": {"quota.scheduling.koordinator.sh/shared-weight": '{"cpu":"1"}'},
        },
        "spec": {"min": {"cpu": "4"}, "max": {"cpu": "8"}},
    },
    "podgroups": {
        "metadata": {"name": "g", "namespace": "default"},
        "spec": {"minMember": 1, "scheduleTimeoutSeconds": 5},
    },
    "persistentvolumeclaims": {
        "metadata": {"name": "c", "namespace": "default"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "s",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    },
    "storageclasses": {
        "metadata": {"name": "s"},
        "provisioner": "d",
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["a"]}]}],
    },
    "csinodes": {
        "metadata": {"name": "n"},
        "spec": {"drivers": [{"name": "d", "nodeID": "n", "allocatable": {"count": 3}}]},
    },
    "poddisruptionbudgets": {
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"disruptionsAllowed": 1, "disruptedPods": {"p": "2027-01-15T08:00:00Z"}},
    },
    "namespaces": {"metadata": {"name": "default", "labels": {"a": "b"}}},
    "pods": {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "creationTimestamp": "2027-01-15T08:00:00Z",
            "labels": {
                "app": "a",
                "pod-group.scheduling.sigs.k8s.io": "g",
                "quota.scheduling.koordinator.sh/name": "q",
            },
            "annotations": {
                f"{_PREFIX}/resource-spec": '{"preferredCPUBindPolicy":"FullPCPUs"}',
                f"{_PREFIX}/reservation-affinity": '{"reservationSelector":{"a":"b"}}',
            },
        },
        "spec": {
            "schedulerName": "koord-scheduler",
            "priority": 5,
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_TERM]}
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", **_TERM}
            ],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}],
            "containers": [
                {
                    "name": "c",
                    "image": "x",
                    "ports": [{"hostPort": 80}],
                    "resources": {"requests": {"cpu": "2", "koordinator.sh/gpu-core": "50"}},
                }
            ],
        },
    },
}
_HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 10**400, 1.5, "", "1e400", "-5Gi", "\x00\x1b[31m\n", "x" * 2**20),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "[" * 10_000, [], {}, [[]], {"": None}),
)


def _paths(tree: Any, at: Path = ()) -> Iterator[Path]:
    if at and at not in (("metadata",), ("metadata", "name"), ("metadata", "namespace")):
        yield at
    members: Iterable[tuple[str | int, Any]] = ()
    if isinstance(tree, dict | list):
        members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in members:
        yield from _paths(value, (*at, key))


def _with(plain: Plain, path: Path, value: Any) -> Plain:
    changed = at = copy.deepcopy(plain)
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    return changed


class _Writers:
    """Takes everything; placements are kept until the test confirms them."""

    def __init__(self) -> None:
        self.placed: list[Any] = []

    def submit(self, what: Any, *_: Any) -> None:
        if hasattr(what, "annotations") and hasattr(what, "node"):
            self.placed.append(what)

    def refuse(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def forget(self, *_: Any) -> None: ...


class _Cluster:
    def __init__(self) -> None:
        async def make() -> SchedulerProcess:
            return SchedulerProcess(cast(Client, None), load(chart_file()), seed=3)

        self.process = asyncio.run(make())
        self.writers: Any = _Writers()
        process: Any = self.process
        process.binder = process.volume_binder = process.reservation_writer = self.writers
        process.statuses = process.events = process.evictor = self.writers
        self.caches = {c.resource.plural: c for c in (*process.caches, process.pods)}
        self._version = 0

    def send(self, plural: str, plain: Plain) -> None:
        self._version += 1
        metadata = plain["metadata"] | {"resourceVersion": str(self._version)}
        if plural in ("pods", "reservations"):
            # Each is another object, and is decided about.
            metadata["uid"] = f"u{self._version}"
        event = {"type": "MODIFIED", "object": plain | {"metadata": metadata}}
        self.caches[plural].take(json.dumps(event).encode())
        self.process.schedule_for(1.0)
        for placement in self.writers.placed:
            self.process.attempts.bound(placement, Bound())
        self.writers.placed.clear()

    def no_faults(self) -> None:
        parts = [self.process.attempts.faults, *(each.faults for each in self.caches.values())]
        assert not [part.part for part in parts if part.count]


@pytest.mark.parametrize("plural", [*_OBJECTS, "reservations"])
def test_no_value_harms_more_than_its_object(plural: str, caplog: pytest.LogCaptureFixture) -> None:
    made = reservation("r", random.Random(1), "koord-scheduler")
    objects = _OBJECTS | {"reservations": made}
    cluster = _Cluster()
    for each, plain in objects.items():
        cluster.send(each, plain)
    for path in _paths(objects[plural]):
        for value in _HOSTILE:
            if path[:2] in (("metadata", "labels"), ("metadata", "annotations")) or (
                path[0] == "metadata" and path[-1] == "creationTimestamp"
            ):
                # The API server keeps maps of text there.
                value = value if isinstance(value, str) else "x"
                if len(path) < 3:
                    value = {"x": value}
            cluster.send(plural, _with(objects[plural], path, value))
            if plural != "pods":
                cluster.send("pods", objects["pods"])
        cluster.no_faults()
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]
    for each, plain in objects.items():
        cluster.send(each, plain)
    container = {"name": "c", "resources": {"requests": {"cpu": "1"}}}
    good = {
        "metadata": {"name": "good", "namespace": "good"},
        "spec": {"schedulerName": "koord-scheduler", "containers": [container]},
    }
    cluster.send("pods", good)
    why = cluster.process.why("good/good")
    assert why is not None and msgspec.json.encode(why)
    assert cluster.process.tables.bookings[why["uid"]].node == "n"
    cluster.no_faults()
