"""Quotas and tables of quotas for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from apis.quota import ElasticQuota, decode_elastic_quota
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.table import QuotaSettings, QuotaTable
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_node, make_pod

PREFIX = "quota.scheduling.koordinator.sh/"
NO_LIMIT = {"cpu": 10**18, "memory": 10**18}


def make_quota(
    name: str,
    least: Mapping[str, str] | None = None,
    most: Mapping[str, str] | None = None,
    *,
    namespace: str = "team",
    parent: str = "",
    lends: bool = True,
    weight: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    created: str = "2026-01-01T00:00:00Z",
) -> ElasticQuota:
    """Return a quota; `labels` and `annotations` are without their prefix."""
    meta: dict[str, Any] = {"name": name, "namespace": namespace, "creationTimestamp": created}
    meta["labels"] = {PREFIX + key: value for key, value in (labels or {}).items()}
    if parent:
        meta["labels"][PREFIX + "parent"] = parent
    if not lends:
        meta["labels"][PREFIX + "allow-lent-resource"] = "false"
    meta["annotations"] = {PREFIX + key: value for key, value in (annotations or {}).items()}
    if weight is not None:
        meta["annotations"][PREFIX + "shared-weight"] = json.dumps(weight)
    spec = {"min": least or {}, "max": most or {"cpu": "1000", "memory": "1000Gi"}}
    return decode_elastic_quota(msgspec.json.encode({"metadata": meta, "spec": spec}))


class Bed:
    """A table of quotas with a cluster of some cpu, and pods by name."""

    def __init__(self, cpu: str = "100", **settings: Any) -> None:
        self.table = QuotaTable(
            QuotaSettings(default_most=NO_LIMIT, system_most=NO_LIMIT, **settings)
        )
        self.shapes = Shapes()
        self.set_cpu(cpu)

    def set_cpu(self, cpu: str) -> None:
        self.table.set_node(0, make_node("n0", allocatable={"cpu": cpu, "memory": "1000Gi"}))

    def quota(self, *args: Any, **more: Any) -> str:
        return self.table.set_quota(make_quota(*args, **more))

    def shape(self, quota: str, cpu: str, *, namespace: str = "default", **more: Any) -> PodShape:
        labels = {PREFIX + "name": quota} if quota else {}
        labels |= more.pop("labels", {})
        pod = make_pod("p", namespace=namespace, requests={"cpu": cpu}, labels=labels, **more)
        return self.shapes.of(pod)

    def want(self, uid: str, quota: str, cpu: str) -> PodShape:
        shape = self.shape(quota, cpu)
        self.table.want(uid, shape)
        return shape

    def place(self, uid: str, quota: str, cpu: str) -> Booking:
        booking = Booking(f"default/{uid}", uid, self.shape(quota, cpu), "n0")
        self.table.place(booking)
        return booking

    def cpus(self) -> dict[str, float]:
        """Return the runtime of all quotas but the built-in ones, in cores."""
        return {
            name: quota.runtime("cpu") / 1000
            for name, quota in self.table.quotas.items()
            if not name.startswith("koordinator-")
        }


def assert_as_made_from_objects(core: SchedulerCore) -> None:
    """Compare the table of quotas with one that is made from the objects and bookings as they are.

    No quota may have a problem: the definition in force would be one that no object shows.
    """
    known = core.plugins.quotas
    assert known is not None and not known.problems()
    again = QuotaTable(known.settings)
    for row, node in enumerate(core.nodes.items.values()):
        again.set_node(row, node)
    for quota_object in core.quotas.items.values():
        again.set_quota(quota_object)
    for pod in core.pods.items.values():
        if not pod.spec.node_name:
            again.want(pod.metadata.uid, core.source.shape_of(pod))
    for booking in core.tables.bookings.values():
        again.place(booking)
    for name, quota in known.quotas.items():
        other = again.quotas[name]
        assert (quota.own, quota.all) == (other.own, other.all), name
        assert quota.runtimes() == other.runtimes(), name
