"""Objects of ever-new names come and go: nothing that the scheduler keeps grows with them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from apis.meta import format_time
from cluster.scheduler.auditing import metrics as auditing
from cluster.scheduler.binding import events, statuses
from cluster.scheduler.binding.placement import Bound
from cluster.scheduler.configuration.auditing import AuditorSettings, MetricLabel
from cluster.scheduler.cycle import advice, evaluation, explanations, nomination, promised
from cluster.scheduler.plugins.quotas import elastic_quota
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.tables import labels, nodes
from cluster.scheduler.tables.reservations import table as reservations
from kube.cache import Cache
from kube.resources import ELASTIC_QUOTAS, POD_GROUPS, PODS, RESERVATIONS
from tests.cluster.fake_api import FakeApi, in_virtual_time
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.configuration.files import chart_profile, file, load

_OURS = ("cluster.", "kube.", "apis.", "collections", "weakref")
_OF_A_KIND = 12
"""Objects of each kind in a round."""
_AUDITOR = AuditorSettings((MetricLabel("app", "app"),))
"""Each object's pods have another value of this label."""
Plain = dict[str, Any]


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded reaches its bound within a round."""
    monkeypatch.setattr(advice, "_MOST_KEPT", 4)
    monkeypatch.setattr(evaluation, "_MOST_KEPT", 4)
    monkeypatch.setattr(explanations, "_MOST_KEPT", 4)
    monkeypatch.setattr(nomination, "_RECENT", 4)
    monkeypatch.setattr(promised, "_MOST_KEPT", 4)
    monkeypatch.setattr(labels, "_MOST_COLUMNS", 8)
    monkeypatch.setattr(labels, "_SPARSE", 0.25)
    monkeypatch.setattr(nodes, "_SPARSE", 0)
    monkeypatch.setattr(reservations, "_MOST_KEPT", 4)
    monkeypatch.setattr(elastic_quota, "_MOST_KEPT", 4)
    monkeypatch.setattr(statuses, "_MOST_REMEMBERED", 4)
    monkeypatch.setattr(events, "_MOST_KNOWN", 4)
    monkeypatch.setattr(auditing, "MOST_SETS", 4)


def test_nothing_grows_with_names_that_are_gone() -> None:
    bed = Bed(json.dumps(file(profiles=[chart_profile()])), auditor=_AUDITOR)
    bed.node("stays", 64)
    caches = {each.resource.kind: each for each in (*bed.core.caches, bed.core.pods)}
    sizes = []
    for number in range(8):
        placed = _round(bed, caches, number)
        assert placed > 4 * _OF_A_KIND
        sizes.append(_sizes(bed.core))
    assert not bed.core.attempts.faults.count
    assert not _grown(sizes[3], sizes[7])


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what is larger by an entry for each object of a kind, with both sizes."""
    pairs = {at: (before.get(at, 0), size) for at, size in after.items()}
    return {at: (old, new) for at, (old, new) in pairs.items() if new - old >= _OF_A_KIND}


class _Api(FakeApi):
    """Binds pods, notes when objects are made, and keeps the UIDs that they are made with."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    async def handle(self, method: str, path: str, data: bytes | None) -> Plain:
        if method == "POST" and path.endswith("/binding"):
            binding = json.loads(data or b"")
            pod = path.removesuffix("/binding")
            metadata = {"annotations": binding["metadata"].get("annotations", {})}
            patch = {"metadata": metadata, "spec": {"nodeName": binding["target"]["name"]}}
            return await super().handle("PATCH", pod, json.dumps(patch).encode())
        return await super().handle(method, path, data)

    def _store(self, path: str, plain: Plain) -> Plain:
        created = format_time(datetime.fromtimestamp(self._clock(), UTC))
        metadata = {"creationTimestamp": created, **plain["metadata"]}
        stored = super()._store(path, {**plain, "metadata": metadata})
        stored["metadata"]["uid"] = metadata.get("uid") or stored["metadata"]["uid"]
        return stored

    def clear(self, kept: set[str]) -> None:
        """Delete all objects but those at these paths."""
        for path in self.objects.keys() - kept:
            self._drop(path)


def test_nothing_that_writes_grows_with_names_that_are_gone() -> None:
    sizes: list[dict[str, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        def clock() -> float:
            return 1_800_000_000.0 + loop.time() - began

        api = _Api(clock)
        profile = chart_profile()
        profile["plugins"]["postFilter"]["enabled"].append({"name": "DefaultPreemption"})
        process = SchedulerProcess(
            api.client(),
            load(file(profiles=[profile])),
            seed=1,
            clock=clock,
            auditor=_AUDITOR,
        )
        resources = {each.resource.kind: each.resource for each in process.caches}
        resources |= {"Pod": PODS, "ScheduleExplanation": process.asked.resource}
        api.follow(*process.caches, process.pods, process.asked)
        reserving, gangs = process.reservation_controller, process.pod_group_statuses
        quotas = process.quota_upkeep
        assert reserving is not None
        assert gangs is not None
        assert quotas is not None
        works = (
            process.statuses.run(),
            process.events.run(),
            process.reservation_writer.run(),
            reserving.run(),
            gangs.run(),
            quotas.run(),
            process.explanations.run(),
            process._schedule(),
        )
        running = [asyncio.create_task(each) for each in works]
        await asyncio.sleep(40.0)
        kept = set(api.objects)
        for number in range(8):
            for each in range(_OF_A_KIND):
                name = f"r{number}-{each}"
                for kind, obj in (*_objects(name), *_evicting(name), _question(name)):
                    api.put(resources[kind], obj)
            await asyncio.sleep(60.0)
            _all_write(api, number)
            api.clear(kept)
            api.writes.clear()
            await asyncio.sleep(700.0)
            sizes.append(_sizes(process))
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        assert not process.attempts.faults.count

    in_virtual_time(main)
    assert not _grown(sizes[3], sizes[7])


def _all_write(api: _Api, number: int) -> None:
    """Check that each of the writers had something to do in a round."""
    name = f"r{number}-0"
    quota = api.get(ELASTIC_QUOTAS, name, namespace=name)
    assert quota["status"]["used"]
    assert api.get(POD_GROUPS, name, namespace=name)["status"]["phase"]
    assert api.get(RESERVATIONS, name)["status"]["nodeName"]
    huge = api.get(PODS, f"huge-{name}", namespace=name)
    assert huge["status"]["conditions"][0]["reason"] == "Unschedulable"
    assert api.get(PODS, f"urgent-{name}", namespace=name)["spec"]["nodeName"] == f"full-{name}"
    assert PODS.path(namespace=name, name=f"victim-{name}") not in api.objects
    question = "/apis/scheduling.koordinator.sh/v1alpha1/namespaces/{0}/scheduleexplanations/{0}"
    assert api.objects[question.format(name)]["status"]["detailedExplanation"]
    events = [each for path, each in api.objects.items() if f"/namespaces/{name}/events/" in path]
    assert {each["reason"] for each in events} >= {"Scheduled", "FailedScheduling", "Preempted"}


def _question(name: str) -> tuple[str, Plain]:
    spec = {"questionObjectKey": f"{name}/huge-{name}"}
    return "ScheduleExplanation", {"metadata": {"name": name, "namespace": name}, "spec": spec}


def _evicting(name: str) -> Iterator[tuple[str, Plain]]:
    """Yield a full node, its pod, and a pod for which that one is evicted."""
    node = f"full-{name}"
    yield "Node", {
        "metadata": {"name": node, "labels": {f"f-{name}": name}},
        "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "9"}},
    }  # fmt: skip
    for pod, priority, where in (
        ("victim", 0, {"nodeName": node}),
        ("urgent", 100, {"nodeSelector": {f"f-{name}": name}}),
    ):
        yield "Pod", {
            "metadata": {
                "name": f"{pod}-{name}", "namespace": name, "uid": f"u-{pod}-{name}",
                "annotations": {},
            },
            "spec": {
                "schedulerName": "koord-scheduler", "priority": priority, **where,
                "containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}],
            },
        }  # fmt: skip


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
    """Return the sizes of all containers and arrays below an object, by the way to them.

    Counters and their shapes refer to each other, and weak tables have them until a collection.
    How soon one comes by itself depends on how much other tests have left in memory.
    """
    gc.collect()
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
