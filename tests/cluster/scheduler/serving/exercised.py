"""A scheduler process without an API server that has decided about some pods, and its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from apis.decode import decode_object
from apis.quota import ElasticQuota
from apis.scheduling import Reservation
from cluster.scheduler.binding.placement import Bound, Placement
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.manifests import config_map
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.exposition import show_state
from kube.cache import Change, Event
from kube.connection import Connection
from kube.kept_client import KeptClient
from tests.cluster.scheduler.making import make_node, make_pod

LINE: Final = re.compile(
    r"(?P<name>[a-z_:]+)(\{(?P<labels>([a-zA-Z_]+=\"[^\"\n]*\",?)*)\})? (\d[0-9.e+-]*|[+]Inf|NaN)"
)
_LABEL: Final = re.compile(r"([a-zA-Z_]+)=\"")
_PARTS: Final = ("_bucket", "_sum", "_count")


@dataclass
class Shown:
    """One name of an exposition. labels: of its series, without `le`; empty if it has none."""

    type: str
    series: int = 0
    labels: set[frozenset[str]] = field(default_factory=set)


def names(text: str) -> dict[str, Shown]:
    """Return what an exposition has, by name."""
    found: dict[str, Shown] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found[name] = Shown(kind)
        elif line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            name = match["name"] if match else line.split("{")[0].split()[0]
            if name not in found:
                name = next(name.removesuffix(part) for part in _PARTS if name.endswith(part))
            labels = (match["labels"] if match else line.partition("{")[2].rpartition("}")[0]) or ""
            found[name].series += 1
            found[name].labels.add(frozenset(_LABEL.findall(labels)) - {"le"})
    return found


def new_process() -> SchedulerProcess:
    """Return a process with the shipped configuration, whose metrics are complete."""
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    text = config_map()["data"]["koord-scheduler-config"]
    configuration = read_configuration(text, obj="shipped")
    made = SchedulerProcess(nowhere, configuration, seed=1, network_status=True)
    show_state(made)
    return made


class Recorder:
    """Takes placements in the place of the binder."""

    def __init__(self, process: SchedulerProcess) -> None:
        self.placements: list[Placement] = []
        process.binder.submit = self.placements.append  # type: ignore[assignment, method-assign]


def decide(
    process: SchedulerProcess, pods: Iterable[tuple[str, str]], *, nodes: int = 3
) -> list[Placement]:
    """Make nodes and pods (name, cpu), and decide; return what would be bound."""
    recorder = Recorder(process)
    for number in range(nodes):
        process.tables.upsert_node(make_node(f"n{number}"))
    for name, cpu in pods:
        pod = make_pod(name, requests={"cpu": cpu}, schedulerName="koord-scheduler")
        process.pods._items[f"default/{name}"] = pod
        process.source.pod_event(Event(Change.ADDED, None, pod))
    while process.attempts.next(process._clock()):
        pass
    return recorder.placements


def exercise(process: SchedulerProcess) -> None:
    """Have every metric of a process show a series."""
    many = [(f"p{number}", "100m") for number in range(60)]
    for placement in decide(process, (*many, ("large", "64"))):
        process._step(placement, "Bind", True, 0.003)
        process.attempts.bound(placement, Bound())
    process.metrics.preempts(1)
    process.metrics.planned.labels().observe(0.001)
    process.metrics.quota_statuses.labels().observe(0.001)
    process.client.counts.answered("POST", 201)
    process.client.counts.verb("POST").duration.observe(0.003)
    reservation = {"metadata": {"name": "r"}, "status": {"phase": "Available",
                   "allocatable": {"cpu": "4"}}}  # fmt: skip
    process.reservations._items["r"] = decode_object(
        json.dumps(reservation).encode(), Reservation, obj="r"
    )
    quota = {"metadata": {"name": "q", "namespace": "a"},
             "spec": {"min": {"cpu": "1"}, "max": {"cpu": "2"}}}  # fmt: skip
    decoded = decode_object(json.dumps(quota).encode(), ElasticQuota, obj="q")
    assert process.quota_source is not None
    process.quota_source.quota_event(Event(Change.ADDED, None, decoded))
