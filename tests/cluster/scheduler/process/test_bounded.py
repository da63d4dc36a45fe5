"""Objects of ever-new names come and go: nothing that the scheduler keeps grows with them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cluster.scheduler.binding.placement import Bound
from cluster.scheduler.cycle import advice, explanations
from cluster.scheduler.tables import labels, nodes
from kube.cache import Cache
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.configuration.files import chart_profile, file

_OURS = ("cluster.", "kube.", "apis.", "collections", "weakref")
_OF_A_KIND = 12
"""Objects of each kind in a round."""
Plain = dict[str, Any]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded reaches its bound within a round."""
    monkeypatch.setattr(advice, "_MOST_KEPT", 4)
    monkeypatch.setattr(explanations, "_MOST_KEPT", 4)
    monkeypatch.setattr(labels, "_MOST_COLUMNS", 8)
    monkeypatch.setattr(labels, "_SPARSE", 0.25)
    monkeypatch.setattr(nodes, "_SPARSE", 0)


def test_nothing_grows_with_names_that_are_gone() -> None:
    bed = Bed(json.dumps(file(profiles=[chart_profile()])))
    bed.node("stays", 64)
    caches = {each.resource.kind: each for each in (*bed.core.caches, bed.core.pods)}
    sizes = []
    for number in range(8):
        placed = _round(bed, caches, number)
        assert placed > 4 * _OF_A_KIND
        sizes.append(_sizes(bed.core))
    assert not bed.core.attempts.faults.count
    before, after = sizes[3], sizes[7]
    grown = {at: (before.get(at, 0), size) for at, size in after.items()}
    grown = {at: (old, new) for at, (old, new) in grown.items() if new - old >= _OF_A_KIND}
    assert not grown


def _round(bed: Bed, caches: dict[str, Cache[Any]], number: int) -> int:
    """Make objects, schedule the pods, delete all. Returns how many pods were placed."""
    made = [each for n in range(_OF_A_KIND) for each in _objects(f"r{number}-{n}")]
    for kind, obj in made:
        bed.show(caches[kind], "ADDED", obj)
    pods = {obj["metadata"]["uid"]: obj for kind, obj in made if kind == "Pod"}
    assert not bed.core.schedule_for(60.0)
    placements, bed.placements = bed.placements, []
    for placement in placements:
        pod = pods[placement.uid]
        pod["spec"]["nodeName"] = placement.node
        pod["metadata"]["annotations"].update(placement.annotations)
        bed.show(bed.core.pods, "MODIFIED", pod)
        bed.core.attempts.bound(placement, Bound())
    bed.now += 30.0
    assert not bed.core.schedule_for(60.0)
    for kind, obj in reversed(made):
        bed.show(caches[kind], "DELETED", obj)
    bed.now += 700.0
    assert not bed.core.schedule_for(60.0)
    for kept in (bed.placements, bed.events, bed.victims, bed.messages, bed.nominated):
        kept.clear()
    return len(placements)


def _objects(name: str) -> Iterator[tuple[str, Plain]]:
    """Yield one object of each kind, and a pod of each that makes tables keep something."""
    meta = {"name": name, "namespace": name}
    yield "Namespace", {"metadata": {"name": name, "labels": {"team": name}}}
    yield "Node", {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, f"l-{name}": name}},
        "spec": {"taints": [{"key": name, "effect": "PreferNoSchedule"}]},
        "status": {
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110"},
            "images": [{"names": [f"image-{name}"], "sizeBytes": 1_000_000}],
        },
    }  # fmt: skip
    yield (
        "NodeMetric",
        {
            "metadata": {"name": name},
            "status": {
                "updateTime": "2027-01-15T08:00:00Z",
                "nodeMetric": {"nodeUsage": {"resources": {"cpu": "1"}}},
            },
        },
    )
    zone = {"name": "node-0", "type": "Node", "resources": [
        {"name": each, "capacity": "4", "allocatable": "4", "available": "4"}
        for each in ("cpu", f"example.com/{name}")
    ]}  # fmt: skip
    yield "NodeResourceTopology", {"metadata": {"name": name}, "zones": [zone]}
    gpu = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    device = {"type": "gpu", "minor": 0, "id": name, "health": True, "resources": gpu}
    yield "Device", {"metadata": {"name": name}, "spec": {"devices": [device]}}
    amounts = {"min": {"cpu": "10"}, "max": {"cpu": "20"}}
    yield "ElasticQuota", {"metadata": meta, "spec": amounts}
    yield "PodGroup", {"metadata": meta, "spec": {"minMember": 1}}
    chosen = {"matchLabels": {"app": name}}
    yield "PodDisruptionBudget", {
        "metadata": meta, "spec": {"selector": chosen}, "status": {"disruptionsAllowed": 1},
    }  # fmt: skip
    container = {"name": "c", "resources": {"requests": {"cpu": "1"}}}
    template = {"spec": {"schedulerName": "koord-scheduler", "containers": [container]}}
    yield (
        "Reservation",
        {
            "metadata": {"name": name, "uid": f"r-{name}"},
            "spec": {"template": template, "owners": [{"labelSelector": chosen}], "ttl": "1h"},
        },
    )
    yield "ReplicaSet", {"metadata": meta, "spec": {"selector": chosen}}
    yield "Service", {"metadata": meta, "spec": {"selector": {"app": name}}}
    yield "StorageClass", {"metadata": {"name": name}, "provisioner": f"p-{name}"}
    yield "PersistentVolumeClaim", {
        "metadata": {
            **meta, "uid": f"c-{name}",
            "annotations": {"pv.kubernetes.io/bind-completed": "yes"},
        },
        "spec": {"volumeName": name, "storageClassName": name, "accessModes": ["ReadWriteOnce"]},
        "status": {"phase": "Bound"},
    }  # fmt: skip
    yield "PersistentVolume", {
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "csi": {"driver": f"d-{name}", "volumeHandle": name},
            "claimRef": {**meta, "uid": f"c-{name}"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": f"l-{name}", "operator": "In", "values": [name]}
            ]}]}},
        },
    }  # fmt: skip
    driver = {"name": f"d-{name}", "nodeID": name, "allocatable": {"count": 5}}
    yield "CSINode", {"metadata": {"name": name}, "spec": {"drivers": [driver]}}
    for kind, (more, spec) in _pods(name, chosen).items():
        yield "Pod", {
            "metadata": {
                **meta, "name": f"{kind}-{name}", "uid": f"u-{kind}-{name}",
                "annotations": {}, **more, "labels": {"app": name, **more.get("labels", {})},
            },
            "spec": {
                "schedulerName": "koord-scheduler", "priority": 5,
                "containers": [{"name": "c", "resources": {"requests": {"cpu": "100m"}}}],
                **spec,
            },
        }  # fmt: skip


def _pods(name: str, chosen: Plain) -> dict[str, tuple[Plain, Plain]]:
    """Return metadata and spec of pods that use what has this name."""

    def asks(amounts: Plain, **more: Any) -> Plain:
        resources = {"requests": amounts, "limits": amounts}
        return {"containers": [{"name": "c", "resources": resources, **more}]}

    port = 1000 + int(name[1:].replace("-", "0"))
    group = {"labels": {"pod-group.scheduling.sigs.k8s.io": name}}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": name}
    reservation = {"scheduling.koordinator.sh/reservation-affinity": json.dumps({"name": name})}
    term = {"topologyKey": f"l-{name}", "labelSelector": chosen}
    spread = {"maxSkew": 1, "topologyKey": f"key-{name}", "whenUnsatisfiable": "DoNotSchedule"}
    gpu = {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        "huge": ({}, asks({"cpu": "500"})),
        "gang": (group, {}),
        "gpu": ({}, asks(gpu)),
        "quota": ({"labels": {"quota.scheduling.koordinator.sh/name": name}}, {}),
        "volume": ({}, {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": name}}]}),
        "anti": ({}, {"affinity": {"podAntiAffinity": {required: [term]}}}),
        "spread": ({}, {"topologySpreadConstraints": [{**spread, "labelSelector": chosen}]}),
        "chosen": ({}, {"nodeSelector": {f"l-{name}": name}}),
        "port": ({}, asks({}, ports=[{"containerPort": 80, "hostPort": port}])),
        "owned": ({"ownerReferences": [{**owner, "controller": True}]}, {}),
        "image": ({}, asks({}, image=f"image-{name}")),
        "named": ({"annotations": reservation}, {}),
    }  # fmt: skip


def _sizes(root: object) -> dict[str, int]:
    """Return the sizes of all containers and arrays below an object, by the way to them."""
    found: dict[str, int] = {}
    seen: dict[int, object] = {}
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        path, obj = todo.pop()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        size, below = _below(obj)
        if size:
            found[path] = found.get(path, 0) + size
        todo += [(f"{path}.{name}" if name else path, each) for name, each in below]
    return found


def _below(obj: object) -> tuple[int, list[tuple[str, object]]]:
    """Return the size of an object and what it refers to, with the names of attributes."""
    if isinstance(obj, dict):
        return len(obj), [("", each) for pair in list(obj.items()) for each in pair]
    if isinstance(obj, list | tuple | set | frozenset | deque):
        return len(obj), [("", each) for each in list(obj)]
    if isinstance(obj, np.ndarray):
        return len(obj) // 64, []
    if not type(obj).__module__.startswith(_OURS) and not isinstance(obj, Callable):  # type: ignore[arg-type]
        return 0, []
    names = [*getattr(obj, "__dict__", ()), "__self__"]
    for each in type(obj).__mro__:
        slots = getattr(each, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    below = [(name, getattr(obj, name, None)) for name in names]
    for cell in getattr(obj, "__closure__", None) or ():
        below.append(("closure", cell.cell_contents))
    return 0, below
