"""The status of PodGroups as it is written: when, how often, and against which version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from apis.quota import PodGroup
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding.pod_groups import PodGroupStatuses
from kube.cache import Cache
from kube.resources import POD_GROUPS, PODS
from tests.cluster.fake_api import FakeApi, in_virtual_time

_LABEL = "pod-group.scheduling.sigs.k8s.io"


class _Cluster:
    """An API server in memory, caches that lag 10 ms behind it, and the writer under test."""

    def __init__(self) -> None:
        self.api = FakeApi()
        client = self.api.client()
        self.groups: Cache[PodGroup] = Cache(client, POD_GROUPS, PodGroup)
        self.pods: Cache[SchedulingPod] = Cache(client, PODS, SchedulingPod)
        members = self.pods.index(lambda pod: [f"ns/{pod.metadata.labels[_LABEL]}"])
        self.statuses = PodGroupStatuses(
            client,
            group_of=self.groups.items.get,
            pods_of=members.get,
            now=lambda: 1_800_000_000.0,
        )
        self.groups.subscribe(self.statuses.seen)
        self.pods.subscribe(
            lambda event: self.statuses.changed(f"ns/{event.new.metadata.labels[_LABEL]}")
        )
        self.api.follow(self.groups, self.pods)

    def group(self, least: int = 2, **more: Any) -> None:
        metadata = {"name": "g", "namespace": "ns", "creationTimestamp": "2027-01-15T07:00:00Z"}
        self.api.put(POD_GROUPS, {"metadata": metadata, "spec": {"minMember": least}, **more})

    def pod(self, name: str, *, node: str = "", phase: str = "Pending") -> None:
        owners = [{"kind": "Job", "name": "job", "uid": "u"}]
        labels = {_LABEL: "g"}
        metadata = {"name": name, "namespace": "ns", "labels": labels, "ownerReferences": owners}
        plain = {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}
        self.api.put(PODS, plain)

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(POD_GROUPS, "g", namespace="ns").get("status", {})
        return found


def _live(scenario: Callable[[_Cluster], Awaitable[None]]) -> _Cluster:
    async def run() -> _Cluster:
        cluster = _Cluster()
        task = asyncio.create_task(cluster.statuses.run())
        try:
            await scenario(cluster)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return cluster

    return in_virtual_time(run)


async def _pass() -> None:
    await asyncio.sleep(1.5)


def test_a_group_follows_its_pods_from_pending_to_finished() -> None:
    async def scenario(cluster: _Cluster) -> None:
        phases = []
        cluster.group()
        for names, node, phase in (
            ("a", "", "Pending"),
            ("b", "", "Pending"),
            ("ab", "n", "Pending"),
            ("ab", "n", "Running"),
            ("ab", "n", "Succeeded"),
        ):
            for name in names:
                cluster.pod(name, node=node, phase=phase)
            await _pass()
            phases.append(cluster.status["phase"])
        assert phases == ["Pending", "Scheduling", "Scheduled", "Running", "Finished"]

    cluster = _live(scenario)
    assert cluster.status == {
        "phase": "Finished",
        "occupiedBy": "ns/job",
        "scheduled": 2,
        "succeeded": 2,
        "scheduleStartTime": "2027-01-15T08:00:00Z",
    }
    assert cluster.statuses.written == 5


def test_a_patch_carries_the_difference_and_the_version_it_was_worked_out_from() -> None:
    async def scenario(cluster: _Cluster) -> None:
        cluster.group(status={"phase": "Scheduled", "scheduled": 2, "occupiedBy": "ns/job"})
        for name in "ab":
            cluster.pod(name, node="n", phase="Running")
        await _pass()

    cluster = _live(scenario)
    ((method, path, patch),) = cluster.api.writes
    assert (method, path.rpartition("/")[2]) == ("PATCH", "g")
    assert patch == {
        "metadata": {"resourceVersion": "1"},
        "status": {
            "phase": "Running",
            "running": 2,
            "scheduleStartTime": "2027-01-15T08:00:00Z",
        },
    }


def test_changes_of_many_pods_are_one_write() -> None:
    async def scenario(cluster: _Cluster) -> None:
        cluster.group(least=50)
        for number in range(50):
            cluster.pod(f"p{number}", node="n", phase="Running")
            await asyncio.sleep(0.01)
        await _pass()

    cluster = _live(scenario)
    assert (cluster.status["phase"], cluster.status["running"]) == ("Running", 50)
    assert cluster.statuses.written == 1


def test_a_write_of_another_client_is_kept_and_the_status_worked_out_again() -> None:
    async def scenario(cluster: _Cluster) -> None:
        cluster.group(least=2)
        cluster.pod("a", node="n")
        cluster.pod("b", node="n")
        await asyncio.sleep(0.02)
        # The cache does not show this yet when the status is worked out.
        cluster.group(least=3)
        cluster.statuses.gather()
        await _pass()

    cluster = _live(scenario)
    stored = cluster.api.get(POD_GROUPS, "g", namespace="ns")
    assert stored["spec"] == {"minMember": 3}
    assert cluster.status["phase"] == "Pending"
    versions = [patch["metadata"]["resourceVersion"] for _, _, patch in cluster.api.writes]
    assert versions[0] == "1"
    assert len(set(versions)) == 2


def test_a_refused_write_is_tried_again() -> None:
    async def scenario(cluster: _Cluster) -> None:
        path = POD_GROUPS.path(namespace="ns", name="g")
        cluster.api.refuse[path] = 503
        cluster.group()
        await asyncio.sleep(20)
        assert "phase" not in cluster.status
        del cluster.api.refuse[path]
        await asyncio.sleep(60)
        assert cluster.status["phase"] == "Pending"

    _live(scenario)


def test_a_deleted_group_is_let_go() -> None:
    async def scenario(cluster: _Cluster) -> None:
        cluster.group()
        await _pass()
        cluster.pod("a")
        await asyncio.sleep(0.02)
        cluster.api.remove(POD_GROUPS, "g", namespace="ns")
        cluster.statuses.gather()
        await _pass()

    cluster = _live(scenario)
    assert cluster.statuses.queue.remembered == 0
