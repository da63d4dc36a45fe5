"""Reservations in a whole scheduler without an API server: which change helps which pod."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest

from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client
from tests.cluster.scheduler.process.test_lives import _Binder, _Silent
from tests.cluster.scheduler.process.test_reservation_lives import _CONFIGURATION, _Writer

_USES = "scheduling.koordinator.sh/reservation-allocated"
_WEB = [{"labelSelector": {"matchLabels": {"app": "web"}}}]


class Bed:
    """A process whose objects come from the test. One node of 4 CPUs."""

    def __init__(self, configuration: SchedulerConfiguration = _CONFIGURATION) -> None:
        self.now = 1_800_000_000.0

        async def make() -> SchedulerProcess:
            return SchedulerProcess(
                cast(Client, None), configuration, seed=3, clock=lambda: self.now
            )

        self.process = asyncio.run(make())
        self.binder, self.writer = _Binder(), _Writer()
        self.process.binder = self.binder  # type: ignore[assignment]
        self.process.reservation_writer = self.writer  # type: ignore[assignment]
        self.process.statuses = _Silent()  # type: ignore[assignment]
        self.process.events = _Silent()  # type: ignore[assignment]
        self.evicted: list[str] = []
        self.process.evict = (  # type: ignore[method-assign]
            lambda victim, controller: self.evicted.append(victim.name)
        )
        self._version = 0
        amounts = {"cpu": "4", "memory": "64Gi", "pods": "10"}
        node = {"metadata": {"name": "n"}, "status": {"allocatable": amounts}}
        self.process.nodes.take(self._line(node))

    def _line(self, obj: dict[str, Any], kind: str = "MODIFIED") -> bytes:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        return msgspec.json.encode({"type": kind, "object": obj})

    def pod(
        self,
        name: str,
        cpu: str,
        *,
        kind: str = "MODIFIED",
        metadata: dict[str, Any] | None = None,
        node: str = "",
        ready: bool = False,
        priority: int = 0,
    ) -> None:
        status: dict[str, Any] = {}
        if ready:
            conditions = [{"type": "Ready", "status": "True"}]
            status = {"phase": "Running", "conditions": conditions}
        resources = {"requests": {"cpu": cpu}}
        obj = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                **(metadata or {}),
            },
            "spec": {
                "schedulerName": "koord-scheduler",
                "nodeName": node,
                "priority": priority,
                "containers": [{"name": "c", "resources": resources}],
            },
            "status": status,
        }
        self.process.pods.take(self._line(obj, kind))

    def reservation(self, name: str, cpu: str, *, kind: str = "MODIFIED", **members: Any) -> None:
        status = {
            "phase": "Available",
            "nodeName": "n",
            "allocatable": {"cpu": cpu},
            **members.pop("status", {}),
        }
        obj = {
            "metadata": {"name": name, "uid": f"uid-{name}"},
            "spec": {
                "template": {"spec": {"schedulerName": "koord-scheduler", "containers": []}},
                "owners": _WEB,
                "ttl": "1h",
                **members,
            },
            "status": status,
        }
        self.process.reservations.take(self._line(obj, kind))

    def placed(self) -> dict[str, str]:
        """Schedule; return the name of the reservation of each pod that was placed, or ""."""
        self.now += 20.0
        self.process.schedule_for(10.0)
        result = {}
        while self.binder.waiting:
            placement = self.binder.waiting.popleft()
            text = placement.annotations.get(_USES)
            result[placement.name] = json.loads(text)["name"] if text else ""
        return result


_OWNER = {"labels": {"app": "web"}}


def test_a_pod_that_is_a_reservation_gives_way_to_its_owner_once_it_is_ready() -> None:
    bed = Bed()
    mode = {
        "labels": {"scheduling.koordinator.sh/operating-mode": "Reservation"},
        "annotations": {"scheduling.koordinator.sh/reservation-owners": json.dumps(_WEB)},
    }
    bed.pod("keeps", "3", metadata=mode, node="n")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {}
    bed.pod("keeps", "3", metadata=mode, node="n", ready=True)
    assert bed.placed() == {"web": "keeps"}
    bed.pod("web-2", "3", metadata=_OWNER)
    assert bed.placed() == {}


def test_a_waiting_pod_is_tried_when_a_reservation_comes_opens_or_ends() -> None:
    bed = Bed()
    bed.reservation("r", "3", owners=[{"object": {"name": "another"}}])
    bed.pod("web", "3", metadata=_OWNER)
    bed.pod("other", "2")
    assert bed.placed() == {}
    bed.reservation("r", "3", unschedulable=True)
    assert bed.placed() == {}
    bed.reservation("r", "3")
    assert bed.placed() == {"web": "r"}
    bed.pod("web", "3", metadata=_OWNER, kind="DELETED")
    assert bed.placed() == {}
    bed.reservation("r", "3", status={"phase": "Failed"})
    assert bed.placed() == {"other": ""}


def test_who_uses_a_reservation_wakes_no_pod() -> None:
    bed = Bed()
    bed.reservation("r", "3", allocateOnce=False)
    bed.pod("large", "2")
    assert bed.placed() == {}
    attempts = bed.process.queue.order("uid-large")
    bed.reservation("r", "3", allocateOnce=False, status={"currentOwners": [{"name": "x"}]})
    assert bed.placed() == {}
    assert bed.process.queue.order("uid-large") == attempts


def test_a_reservation_that_is_deleted_while_a_pod_is_bound_to_use_it() -> None:
    bed = Bed()
    bed.reservation("r", "3")
    bed.pod("web", "3", metadata=_OWNER)
    assert bed.placed() == {"web": "r"}
    bed.reservation("r", "3", kind="DELETED")
    bed.pod("other", "2")
    assert bed.placed() == {}
    uses = {"annotations": {_USES: '{"name":"r","uid":"uid-r"}'}, **_OWNER}
    bed.pod("web", "3", metadata=uses, node="n")
    nodes = bed.process.tables.nodes
    assert int(nodes.requested[nodes.row("n"), 0]) == 3000
    bed.pod("web", "3", metadata=uses, node="n", kind="DELETED")
    assert bed.placed() == {"other": ""}
    assert not len(bed.process.tables.reservations)


_PREEMPTS = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    postFilter: {enabled: [{name: Reservation}], disabled: [{name: %s}]}
    reserve: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
  pluginConfig:
  - name: Reservation
    args: {enablePreemption: %s}
"""


@pytest.mark.parametrize("other", ["DefaultPreemption", "none"])
@pytest.mark.parametrize("enabled", [True, False])
def test_pods_are_evicted_for_reservations_where_that_is_enabled(enabled: bool, other: str) -> None:
    disabled = "DefaultPreemption" if other == "none" else "ImageLocality"
    text = _PREEMPTS % (disabled, str(enabled).lower())
    bed = Bed(read_configuration(text, obj="test"))
    protected = {"labels": {"scheduling.koordinator.sh/disable-preemptible": "true"}}
    bed.pod("protected", "1", node="n", metadata=protected)
    bed.pod("victim", "2", node="n")
    resources = {"requests": {"cpu": "3"}}
    spec = {
        "schedulerName": "koord-scheduler",
        "containers": [{"name": "c", "resources": resources}],
    }
    pending = {"phase": "Pending", "nodeName": "", "allocatable": {}}
    bed.reservation("r", "3", template={"spec": spec}, status=pending)
    assert bed.placed() == {}
    assert bed.evicted == (["victim"] if enabled else [])
    assert "Insufficient cpu" in bed.writer.refused["uid-r"]
    if enabled:
        # The room is the reservation's, not a less important pod's.
        bed.pod("victim", "2", node="n", kind="DELETED")
        bed.pod("late", "1", priority=10)
        assert bed.placed() == {}
        assert [placement.name for placement in bed.writer.waiting] == ["r"]


def test_a_reservation_is_never_a_victim() -> None:
    bed = Bed(read_configuration(_PREEMPTS % ("ImageLocality", "true"), obj="test"))
    spec = {"schedulerName": "koord-scheduler", "priority": -5, "containers": []}
    bed.reservation("r", "3", template={"spec": spec})
    bed.pod("important", "3", priority=1000)
    assert bed.placed() == {}
    assert bed.evicted == []
