"""How long it takes to find the victims of a preemption.

    python -m benchmarks.scheduler_preemption [--nodes 5000] [--pods-per-node 20] [--times 50]
        [--kinds amounts gang ...]

No API server: every node is full. `amounts`: pods are in the way by what they request. `budgets`:
each pod also belongs to one of 500 PodDisruptionBudgets. `ports`: a host port is taken too, so that
nodes are tried one by one. `spread`: a hard spread constraint, likewise. `none`: nothing is less
important. `crowded`: a hard spread constraint that no eviction satisfies. `blocked`: a host port
that pods of a higher priority have on every node.
`gang`: 100 pods that make room together. `gang-labels`: the same, each with a label of its own, as
of an indexed Job. `gang-spread`: the same with a hard spread constraint over hosts. `gang-short`:
100 pods of which no two fit on a node, and nodes for 99 of them. `gang-network`: as `gang`, in one
of 125 racks. `gang-network-labels`: the same, each with a label of its own.
Each time a node changes first, as it does in a cluster that lives; `first` is the search
after what a process prepares when it has read the cluster. Garbage is collected as in the process.
`promised`: a decision about a pod while 1,000 others, more important, have nominated nodes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

from apis.meta import LabelSelector
from apis.scheduling_pod import SchedulingPod, decode_scheduling_node, decode_scheduling_pod
from benchmarks.quantiles import quantile
from benchmarks.running import run_main
from cluster.collection import without_full_collections
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import Budget
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import Layer
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: bench
  plugins:
    filter:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
    reserve:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
"""
_NOW = 1_800_000_000.0
_APPS = 500
_GANG = 100
"""Pods of a gang."""
_PROMISED = 1000
_RACKS = 125


def _pod(*, app: str, cpu: int, priority: int, index: str = "", **spec: object) -> SchedulingPod:
    ports = [{"containerPort": 1, "hostPort": 80}] if spec.pop("port", False) else []
    resources = {"requests": {"cpu": f"{cpu}m", "memory": "64Mi"}}
    labels = {"app": app} | ({"index": index} if index else {})
    body = {
        "metadata": {"name": "p", "namespace": "default", "labels": labels},
        "spec": {
            "schedulerName": "bench",
            "priority": priority,
            "containers": [{"name": "c", "image": "x", "resources": resources, "ports": ports}],
            **spec,
        },
    }
    return decode_scheduling_pod(msgspec.json.encode(body))


def _full_cluster(nodes: int, pods: int, shapes: Shapes, *, kind: str) -> Scheduling:
    tables = Tables()
    plugins = make_plugins(read_configuration(_CONFIGURATION, obj="benchmark"), tables)
    for load in plugins.loads:
        load.advance(_NOW)
    random = Random(1)
    kinds = [
        shapes.of(_pod(app=f"a{number}", cpu=1000, priority=random.choice((0, 10, 100))))
        for number in range(_APPS)
    ]
    first = {
        "ports": shapes.of(_pod(app="port", cpu=1000, priority=100, port=True)),
        "blocked": shapes.of(_pod(app="port", cpu=1000, priority=5000, port=True)),
        "crowded": shapes.of(_pod(app="new", cpu=1000, priority=5000)),
    }.get(kind)
    important = shapes.of(_pod(app="kept", cpu=1000, priority=5000))
    for number in range(nodes):
        name = f"n{number}"
        labels = {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": f"z{number % 3}",
            "rack": f"r{number % _RACKS}",
        }
        amounts = {"cpu": str(pods), "memory": "128Gi", "pods": "110"}
        node = {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": amounts}}
        tables.upsert_node(decode_scheduling_node(msgspec.json.encode(node)))
        for at in range(pods):
            shape = random.choice(kinds) if first is None or at else first
            if kind == "gang-short" and number >= _GANG - 1:
                shape = important
            uid = f"{name}-{at}"
            tables.place(Booking(f"default/{uid}", uid, shape, name, start=random.random()))
    plugins.network.set((Layer("RackLayer", ("rack",)),))
    return Scheduling(
        tables, plugins.profiles, seed=1, preemption=plugins.preemption, network=plugins.network
    )


def _measure(scheduling: Scheduling, shape: PodShape, times: int) -> tuple[float, list[float]]:
    """Return the milliseconds of the first search and of the others."""
    result = []
    random = Random(2)
    found = 0
    scheduling.prepare()
    for _ in range(times + 1):
        row = random.randrange(scheduling.tables.nodes.count)
        booking = next(iter(scheduling.tables.on(row).values()))
        scheduling.tables.place(booking)
        outcome = scheduling.schedule(
            key="default/new", uid="new", shape=shape, profile="bench", now=_NOW
        )
        if isinstance(outcome, Placed):
            raise SystemExit("the pod was placed without any preemption")
        pod = PendingPod("default/new", "new", shape.priority, shape, 0.0)
        began = time.perf_counter()
        answer = scheduling.post_filter(pod, outcome.diagnosis, lambda booking: False)
        result.append((time.perf_counter() - began) * 1e3)
        found += not isinstance(answer, NotFound)
    if found not in (0, times + 1):
        raise SystemExit(f"{found} of {times + 1} searches found victims")
    return result[0], result[1:]


def _measure_gang(
    scheduling: Scheduling, members: Sequence[PodShape], times: int, gather: Gather | None
) -> tuple[float, list[float]]:
    """As `_measure`, for a gang of pods of these shapes."""
    result = []
    random = Random(2)
    tables = scheduling.tables
    pods = tuple(
        PendingPod(f"default/new-{n}", f"new-{n}", shape.priority, shape, 0.0, "default/g")
        for n, shape in enumerate(members)
    )
    wanted = (Wanted("default/g", _GANG, pods, gather),)
    kinds = set()
    scheduling.prepare()
    for _ in range(times + 1):
        row = random.randrange(tables.nodes.count)
        tables.place(next(iter(tables.on(row).values())))
        began = time.perf_counter()
        answer = scheduling.seats(pods[0], wanted, lambda booking: False)
        result.append((time.perf_counter() - began) * 1e3)
        kinds.add(type(answer))
        if gather is not None and isinstance(answer, NotFound):
            raise SystemExit(answer.remark)
    if len(kinds) != 1:
        raise SystemExit("some searches found victims, and some did not")
    return result[0], result[1:]


def _measure_decisions(
    scheduling: Scheduling, shape: PodShape, times: int
) -> tuple[float, list[float]]:
    """Return the milliseconds of decisions while many nodes are promised to other pods."""
    result = []
    random = Random(2)
    tables = scheduling.tables
    rows = random.sample(range(tables.nodes.count), min(_PROMISED, tables.nodes.count))
    for number, row in enumerate(rows):
        uid = f"promised-{number}"
        other = PendingPod(f"default/{uid}", uid, shape.priority, shape, 0.0)
        scheduling.nominator.nominate(other, tables.nodes.name(row))
    for _ in range(times + 1):
        row = random.randrange(tables.nodes.count)
        tables.remove(next(iter(tables.on(row))))
        began = time.perf_counter()
        scheduling.schedule(key="default/new", uid="new", shape=shape, profile="bench", now=_NOW)
        result.append((time.perf_counter() - began) * 1e3)
    return result[0], result[1:]


_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app": "new"}},
}
_CONSTRAINTS: dict[str, dict[str, object]] = {
    "spread": _SPREAD,
    # Three zones are fewer than asked for, and each has such a pod that is more important.
    "crowded": _SPREAD | {"minDomains": 4},
    "gang-spread": _SPREAD | {"topologyKey": "kubernetes.io/hostname"},
}
"""Kind -> the spread constraint of the new pod."""

_KINDS = (
    "amounts",
    "budgets",
    "ports",
    "spread",
    "none",
    "crowded",
    "blocked",
    "gang",
    "gang-labels",
    "gang-spread",
    "gang-short",
    "gang-network",
    "gang-network-labels",
    "promised",
)


def _measure_kind(
    kind: str, nodes: int, pods_per_node: int, times: int
) -> tuple[float, list[float]]:
    """Return the milliseconds of the first search and of the others, in a cluster of its own."""
    shapes = Shapes()
    cluster = _full_cluster(nodes, pods_per_node, shapes, kind=kind)
    if kind == "budgets":
        for number in range(_APPS):
            selector = LabelSelector(match_labels={"app": f"a{number}"})
            cluster.budgets.set(Budget("default", f"b{number}", selector, number % 2))
    spec: dict[str, Any] = {}
    if kind in ("ports", "blocked"):
        spec["port"] = True
    if kind in _CONSTRAINTS:
        spec["topologySpreadConstraints"] = [_CONSTRAINTS[kind]]
    priority = 0 if kind == "none" else 1000
    cpu = {"promised": 1000, "gang-short": 12_000}.get(kind, 3000)
    shape = shapes.of(_pod(app="new", cpu=cpu, priority=priority, **spec))
    if kind.startswith("gang"):
        members = [shape] * _GANG
        gather = Gather(must=("RackLayer",)) if "network" in kind else None
        if kind.endswith("-labels"):
            pods = (_pod(app="new", cpu=cpu, priority=priority, index=str(n)) for n in range(_GANG))
            members = [shapes.of(pod) for pod in pods]
        return _measure_gang(cluster, members, times, gather)
    if kind == "promised":
        return _measure_decisions(cluster, shape, times)
    return _measure(cluster, shape, times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods-per-node", type=int, default=20)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--kinds", nargs="*", default=list(_KINDS), choices=_KINDS)
    given = parser.parse_args()
    print(f"{given.nodes} nodes with {given.pods_per_node} pods each; milliseconds")
    with without_full_collections():
        for kind in given.kinds:
            first, others = _measure_kind(kind, given.nodes, given.pods_per_node, given.times)
            p50, p99 = quantile(others, 0.5), quantile(others, 0.99)
            print(f"{kind:19} first {first:7.1f}  p50 {p50:7.1f}  p99 {p99:7.1f}", flush=True)
            # The cluster has cycles, and would be freed in the middle of the next kind.
            gc.collect()


if __name__ == "__main__":
    run_main(main)
