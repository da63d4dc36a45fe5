"""How long a decision takes: filter and score all nodes, choose, book.

    python -m benchmarks.scheduler_decision [--nodes 5000] [--pods 3000] [--reservations 2000]

No API server: nodes and pods are made in memory, with every plugin that needs no further objects
on, and NodeMetrics for all nodes. `equal`: pods of one shape. `mixed`: 20 shapes in turns, with
node affinity. `owned`: 20 workloads with the default spread. `new`: each pod has a shape of its
own. In the last three kinds there are `--reservations`, one on a node: `beside` are equal pods that
match none of them, `inside` pods of one shape that each use one of all, `shares` pods of 20
workloads with an equal part of the reservations each, with room for two pods in every one.
In `local` and `made` each pod has a claim of its own: for one of the local volumes, of which each
node has one, or for a volume that is made after the decision, where each node reports its free
storage. A CSI driver limits the volumes of all nodes.
`quotas`: pods of 500 quotas in turns, one shape each; `scarce`: the same, where the quotas request
twice what there is, so that each new pod has the cluster divided again.
Times are of the decision and the booking together, without reading the pod; for quotas also of
counting the pod's request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from apis.decode import json_decoder
from apis.keys import ANNOTATION_RESERVE_POD
from apis.meta import LabelSelector
from apis.nodemetric import NodeMetric
from apis.quota import decode_elastic_quota
from apis.scheduling import ReservationOwner
from apis.scheduling_pod import SchedulingPod, decode_scheduling_node, decode_scheduling_pod
from apis.storage import decode_claim
from benchmarks.quantiles import quantile
from benchmarks.running import run_main
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.attachments import DriverLimits
from cluster.scheduler.tables.volumes.objects import Attached, Class, Volume, claim_of
from cluster.scheduler.tables.volumes.places import Place, place_of_selector

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: bench
  plugins:
    preFilter: {enabled: [{name: ElasticQuota}]}
    filter:
      enabled:
      - {name: Reservation}
      - {name: LoadAwareScheduling}
      - {name: NodeNUMAResource}
      - {name: DeviceShare}
    score:
      enabled:
      - {name: Reservation, weight: 5000}
      - {name: LoadAwareScheduling, weight: 1}
      - {name: NodeNUMAResource, weight: 1}
      - {name: DeviceShare, weight: 1}
    reserve:
      enabled:
      - {name: Reservation}
      - {name: LoadAwareScheduling}
      - {name: NodeNUMAResource}
      - {name: DeviceShare}
"""
_NOW = 1_800_000_000.0
_decode_metric = json_decoder(NodeMetric)


_QUOTAS: Final = 500


def _scheduling(nodes: int) -> tuple[Scheduling, QuotaTable]:
    tables = Tables()
    plugins = make_plugins(read_configuration(_CONFIGURATION, obj="benchmark"), tables)
    for load in plugins.loads:
        load.advance(_NOW)
    for number in range(nodes):
        name = f"n{number}"
        labels = {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": f"z{number % 3}",
            "size": f"s{number % 4}",
        }
        amounts = {"cpu": "32", "memory": "128Gi", "pods": "110"}
        node = {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": amounts}}
        row = tables.upsert_node(decode_scheduling_node(msgspec.json.encode(node)))
        usage = {"resources": {"cpu": f"{number % 9}", "memory": "9Gi"}}
        status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": {"nodeUsage": usage}}
        metric = _decode_metric(msgspec.json.encode({"metadata": {}, "status": status}))
        for load in plugins.loads:
            load.set_report(row, metric)
    assert plugins.quotas is not None
    return Scheduling(tables, plugins.profiles, seed=1), plugins.quotas


def _make_quotas(table: QuotaTable, shapes: Shapes, nodes: int, *, scarce: bool) -> list[PodShape]:
    """Make quotas, and in each a pod that waits; return the shapes of these pods."""
    waiting = []
    for number in range(_QUOTAS):
        spec = {"min": {"cpu": "1", "memory": "4Gi"}, "max": {"cpu": "32000", "memory": "512Ti"}}
        body = {"metadata": {"name": f"q{number}", "namespace": "default"}, "spec": spec}
        table.set_quota(decode_elastic_quota(msgspec.json.encode(body)))
        cpu = 2 * nodes * 32_000 // _QUOTAS if scarce else 100
        shape = shapes.of(_pod(number, app="waits", cpu=cpu, quota=f"q{number}"))
        table.want(f"waits{number}", shape)
        waiting.append(shape)
    return waiting


def _pod(
    number: int,
    *,
    app: str,
    cpu: int,
    affinity: bool = False,
    quota: str = "",
    claim: str = "",
    reserves: bool = False,
) -> SchedulingPod:
    spec: dict[str, object] = {}
    if claim:
        source = {"claimName": claim}
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": source}]
    if affinity:
        expression = {"key": "size", "operator": "In", "values": [f"s{number % 4}"]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        spec["affinity"] = {"nodeAffinity": rule}
    annotations = {ANNOTATION_RESERVE_POD: "true"} if reserves else {}
    labels = {"app": app} | ({"quota.scheduling.koordinator.sh/name": quota} if quota else {})
    resources = {"requests": {"cpu": f"{cpu}m", "memory": "64Mi"}}
    body = {
        "metadata": {
            "name": f"p{number}",
            "namespace": "default",
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "schedulerName": "bench",
            "priority": 9500,
            "containers": [{"name": "main", "image": "x", "resources": resources}],
            **spec,
        },
    }
    return decode_scheduling_pod(msgspec.json.encode(body))


def _reserve(tables: Tables, shapes: Shapes, count: int, app: Callable[[int], str]) -> None:
    """Make reservations of 200m and 128Mi for the workload app(number), one on a node."""
    requests = {"cpu": 200, "memory": 128 << 20}
    shape = shapes.of(_pod(0, app="", cpu=200, reserves=True))
    for number in range(count):
        selector = LabelSelector(match_labels={"app": app(number)})
        uid = f"r{number}"
        facts = ReservationFacts(
            name=uid,
            uid=uid,
            owners=(ReservationOwner(label_selector=selector),),
            allocatable=requests,
            policy=AllocatePolicy.RESTRICTED,
            once=False,
        )
        tables.reservations.upsert(facts)
        tables.place(Booking(f"default/{uid}", uid, shape, f"n{number}"))


def _store(tables: Tables, nodes: int, pods: int, *, provisioner: str) -> None:
    """Make claims of one class, a local volume and a report of free storage on each node."""
    tables.volumes.set_class(Class("store", True, provisioner, None))
    tables.volumes.set_driver("csi.bench", reports_storage=True)
    for number in range(pods):
        claim = {
            "metadata": {"name": f"c{number}", "namespace": "default", "uid": f"c{number}"},
            "spec": {
                "storageClassName": "store",
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        tables.volumes.set_claim(claim_of(decode_claim(msgspec.json.encode(claim))))
    for number in range(nodes):
        host = LabelSelector(match_labels={"kubernetes.io/hostname": f"n{number}"})
        place = place_of_selector(host)
        tables.attachments.set_limits(f"n{number}", DriverLimits({"csi.bench": 8}, frozenset()))
        tables.volumes.set_storage(f"r{number}", "store", place, 10 << 30)
        if not provisioner:
            tables.volumes.set_volume(_volume(number, place))


def _volume(number: int, place: Place, *, claim: str = "") -> Volume:
    """Return a volume of the class, free unless it is for a claim."""
    return Volume(
        name=f"v{number}",
        class_name="store",
        modes=frozenset({"ReadWriteOnce"}),
        volume_mode="Filesystem",
        size=(1 << 30) + number,
        claim=claim,
        claim_uid="",
        available=not claim,
        deleting=False,
        labels=(),
        place=place,
        zones=(),
        attached=Attached("csi.bench", f"v{number}"),
    )


def _provision(tables: Tables, number: int, node: str) -> None:
    """Show the volume that was made on a node for the claim of a pod."""
    place = place_of_selector(LabelSelector(match_labels={"kubernetes.io/hostname": node}))
    tables.volumes.set_volume(_volume(number, place, claim=f"default/c{number}"))
    claim = tables.volumes.claim(f"default/c{number}")
    assert claim is not None
    tables.volumes.set_claim(replace(claim, volume=f"v{number}", bound=True))


_PROVISIONERS = {"local": "", "made": "csi.bench"}
"""Kind -> what makes the volumes of its claims, "" if they exist."""

_RESERVED_FOR: dict[str, Callable[[int], str]] = {
    "beside": lambda number: f"other{number}",
    "inside": lambda number: "a",
    "shares": lambda number: f"a{number % 20}",
}
"""Kind -> the workload that the reservation of a number is for."""

_KINDS: dict[str, Callable[[int], SchedulingPod]] = {
    "equal": lambda number: _pod(number, app="a", cpu=100),
    "mixed": lambda number: _pod(number % 20, app="a", cpu=100 + number % 20, affinity=True),
    "owned": lambda number: _pod(number, app=f"a{number % 20}", cpu=100),
    "new": lambda number: _pod(number, app="a", cpu=100 + number),
    "beside": lambda number: _pod(number, app="a", cpu=100),
    "inside": lambda number: _pod(number, app="a", cpu=100),
    "shares": lambda number: _pod(number, app=f"a{number % 20}", cpu=100),
    "quotas": lambda number: _pod(number, app="a", cpu=100, quota=f"q{number % _QUOTAS}"),
    "scarce": lambda number: _pod(number, app="a", cpu=100, quota=f"q{number % _QUOTAS}"),
    "local": lambda number: _pod(number, app="a", cpu=100, claim=f"c{number}"),
    "made": lambda number: _pod(number, app="a", cpu=100, claim=f"c{number}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument("--reservations", type=int, default=2000)
    parser.add_argument("--kinds", nargs="*", default=list(_KINDS), choices=list(_KINDS))
    given = parser.parse_args()
    print(f"{given.nodes} nodes, {given.pods} pods of each kind; microseconds")
    for kind in given.kinds:
        make = _KINDS[kind]
        scheduling, quotas = _scheduling(given.nodes)
        shapes = Shapes()
        if kind in _RESERVED_FOR:
            count = min(given.reservations, given.nodes)
            _reserve(scheduling.tables, shapes, count, _RESERVED_FOR[kind])
        if kind in _PROVISIONERS:
            provisioner = _PROVISIONERS[kind]
            _store(scheduling.tables, given.nodes, given.pods, provisioner=provisioner)
        kept: list[PodShape] = []
        if kind in ("quotas", "scarce"):
            kept += _make_quotas(quotas, shapes, given.nodes, scarce=kind == "scarce")
        times = []
        for number in range(given.pods):
            pod = make(number)
            selector = None
            if kind == "owned":
                selector = LabelSelector(match_labels=pod.metadata.labels)
            shape = shapes.of(pod, spread_by=selector)
            kept.append(shape)
            began = time.perf_counter()
            quotas.want(str(number), shape)
            outcome = scheduling.schedule(
                key=f"default/p{number}", uid=str(number), shape=shape, profile="bench", now=_NOW
            )
            times.append((time.perf_counter() - began) * 1e6)
            if not isinstance(outcome, Placed):
                raise SystemExit(f"{kind}: {outcome.diagnosis.message}")
            if kind == "made":
                _provision(scheduling.tables, number, outcome.booking.node)
        p50, p99 = quantile(times, 0.5), quantile(times, 0.99)
        print(f"{kind:6} p50 {p50:7.0f}  p99 {p99:7.0f}", flush=True)


if __name__ == "__main__":
    run_main(main)
