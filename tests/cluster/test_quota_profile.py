"""The quota of a profile: its contents, when it is written, and late caches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from apis.core import Node
from apis.meta import ObjectReference
from apis.quota import ElasticQuota, ElasticQuotaProfile
from cluster.manager.quota_profile import MAX_AMOUNT, QuotaProfileController
from kube.cache import Cache
from kube.client import ApiError, Client
from kube.events import EventRecorder
from kube.resources import ELASTIC_QUOTAS, NODES, QUOTA_PROFILES
from tests.cluster.fake_api import FakeApi

PREFIX = "quota.scheduling.koordinator.sh"
TREE = f"{PREFIX}/tree-id"
KEY = "team/pool"


def node(
    name: str,
    cpu: str = "8",
    memory: str = "32Gi",
    *,
    pool: str = "a",
    ready: str = "True",
    cordoned: bool = False,
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"pool": pool}},
        "spec": {"unschedulable": cordoned},
        "status": {
            "allocatable": {"cpu": cpu, "memory": memory},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def profile(**spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"pool": "a"}}
    return {
        "metadata": {"name": "pool", "namespace": "team"},
        "spec": {"quotaName": "root", "nodeSelector": selector, **spec},
    }


class Said(EventRecorder):
    """Keeps warnings as texts."""

    def __init__(self, client: Client, texts: list[str]) -> None:
        super().__init__(client, component="test")
        self.texts = texts

    def warning(self, about: ObjectReference, reason: str, message: str) -> None:
        self.texts.append(f"{reason}: {message}")


class World:
    """A controller, its caches and the server that they follow."""

    def __init__(self, server: FakeApi, client: Any) -> None:
        self.server = server
        self.profiles = Cache(client, QUOTA_PROFILES, ElasticQuotaProfile)
        self.quotas = Cache(client, ELASTIC_QUOTAS, ElasticQuota)
        self.nodes = Cache(client, NODES, Node)
        self.events: list[str] = []
        self.controller = QuotaProfileController(
            client, self.profiles, self.quotas, self.nodes, Said(client, self.events)
        )

    def show(self) -> None:
        self.server.show(self.profiles, self.quotas, self.nodes)

    def quota(self) -> dict[str, Any]:
        return self.server.get(ELASTIC_QUOTAS, "root", namespace="team")

    async def settle(self) -> None:
        """Reconcile and show until nothing is written."""
        for _ in range(10):
            before = len(self.server.writes)
            self.show()
            await self.controller.reconcile(KEY)
            if len(self.server.writes) == before:
                return
        raise AssertionError(f"it never settles: {self.server.writes[-3:]}")


def run(test: Callable[[World], Awaitable[None]], *objects: tuple[Any, dict[str, Any]]) -> None:
    async def main() -> None:
        server = FakeApi()
        for resource, plain in objects:
            server.put(resource, plain)
        world = World(server, server.client())
        await test(world)
        # A fault of a subscriber would only be logged.
        assert [each.faults.count for each in (world.nodes, world.quotas, world.profiles)] == [
            0
        ] * 3

    asyncio.run(main())


def test_a_profile_makes_the_root_quota_of_its_nodes() -> None:
    async def check(world: World) -> None:
        await world.settle()
        assert world.quota()["spec"] == {
            "min": {"cpu": "15", "memory": "34359738369"},
            "max": {"cpu": str(MAX_AMOUNT), "memory": str(MAX_AMOUNT)},
        }
        metadata = world.quota()["metadata"]
        tree = world.server.get(QUOTA_PROFILES, "pool", namespace="team")["metadata"]["labels"]
        assert metadata["labels"] == {
            f"{PREFIX}/profile": "pool",
            f"{PREFIX}/is-root": "true",
            TREE: tree[TREE],
            "mine": "x",
        }
        annotations = {key: json.loads(text) for key, text in metadata["annotations"].items()}
        assert annotations == {
            f"{PREFIX}/total-resource": {"cpu": "15", "memory": "34359738369"},
            f"{PREFIX}/unschedulable-resource": {"cpu": "7", "memory": "1"},
        }
        assert world.controller.writes == len(world.server.writes) == 2

    run(
        check,
        (NODES, node("n1")),
        (NODES, node("n2", "7", "1", cordoned=True)),
        (NODES, node("other", pool="b")),
        (QUOTA_PROFILES, profile(quotaLabels={"mine": "x"})),
    )


@pytest.mark.parametrize(
    ("odd", "missing"),
    [
        ({"ready": "False"}, {"cpu": "8", "memory": "32Gi"}),
        ({"ready": "Unknown"}, {"cpu": "8", "memory": "32Gi"}),
        ({"cordoned": True}, {"cpu": "8", "memory": "32Gi"}),
        ({}, {}),
    ],
)
def test_nodes_that_take_no_pods_are_counted_apart(
    odd: dict[str, Any], missing: dict[str, str]
) -> None:
    async def check(world: World) -> None:
        await world.settle()
        annotations = world.quota()["metadata"]["annotations"]
        assert json.loads(annotations[f"{PREFIX}/unschedulable-resource"]) == missing
        assert world.quota()["spec"]["min"] == {"cpu": "8", "memory": "32Gi"}

    run(check, (NODES, node("n1", **odd)), (QUOTA_PROFILES, profile()))


def test_the_quota_follows_nodes_that_come_and_go_and_foreign_edits() -> None:
    async def check(world: World) -> None:
        await world.settle()
        world.server.put(NODES, node("n2", "1500m", "1Gi"))
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "9500m", "memory": "33Gi"}
        world.server.remove(NODES, "n1")
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "1500m", "memory": "1Gi"}
        edited = world.quota()
        edited = {**edited, "spec": {"min": {"cpu": "1", "example.com/x": "5"}, "max": {}}}
        world.server.put(ELASTIC_QUOTAS, edited)
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "1500m", "memory": "1Gi"}
        world.server.remove(ELASTIC_QUOTAS, "root", namespace="team")
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "1500m", "memory": "1Gi"}
        world.server.remove(QUOTA_PROFILES, "pool", namespace="team")
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "1500m", "memory": "1Gi"}

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


def test_a_late_cache_causes_no_second_write() -> None:
    async def check(world: World) -> None:
        world.show()
        for _ in range(5):  # neither the label of the tree nor the quota is in the caches yet
            await world.controller.reconcile(KEY)
        assert [method for method, _, _ in world.server.writes] == ["PATCH", "POST"]
        world.server.put(NODES, node("n2"))
        world.server.show(world.nodes)
        for _ in range(5):
            again = await world.controller.reconcile(KEY)
        assert [method for method, _, _ in world.server.writes] == ["PATCH", "POST", "PATCH"]
        # If the event never comes, the cache counts again after a time.
        assert again is not None and 0 < again <= 60
        world.show()
        assert await world.controller.reconcile(KEY) is None
        assert len(world.server.writes) == 3

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


def test_a_write_is_computed_against_what_was_written_last() -> None:
    """The cached quota has a key that the last write removed already."""

    async def check(world: World) -> None:
        await world.settle()
        keys = {f"{PREFIX}/resource-keys": '["cpu","example.com/x"]'}
        changed = world.server.get(QUOTA_PROFILES, "pool", namespace="team")
        changed = {**changed, "metadata": {**changed["metadata"], "annotations": keys}}
        world.server.put(QUOTA_PROFILES, changed)
        world.server.show(world.profiles)
        await world.controller.reconcile(KEY)
        assert world.quota()["spec"]["min"] == {"cpu": "8", "example.com/x": "0"}
        back = {**changed, "metadata": {**changed["metadata"], "annotations": {}}}
        world.server.put(QUOTA_PROFILES, back)
        world.server.show(world.profiles)  # the quota's cache still shows the first state
        await world.controller.reconcile(KEY)
        assert world.quota()["spec"]["min"] == {"cpu": "8", "memory": "32Gi"}
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "8", "memory": "32Gi"}

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


def test_a_quota_that_is_deleted_before_the_cache_showed_it_is_made_again() -> None:
    async def check(world: World) -> None:
        world.show()
        await world.controller.reconcile(KEY)
        world.server.remove(ELASTIC_QUOTAS, "root", namespace="team")
        world.server.put(NODES, node("n2"))
        world.server.show(world.nodes)
        with pytest.raises(ApiError):
            await world.controller.reconcile(KEY)  # patches what is not there any more
        # The API server's answer counts, though neither creation nor deletion was shown yet.
        await world.controller.reconcile(KEY)
        assert world.server.writes[-1][0] == "POST"
        await world.settle()
        assert world.quota()["spec"]["min"] == {"cpu": "16", "memory": "64Gi"}

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


def test_our_writes_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("kube.own_writes.time.monotonic", lambda: now)

    async def check(world: World) -> None:
        nonlocal now
        world.show()
        await world.controller.reconcile(KEY)
        world.server.remove(ELASTIC_QUOTAS, "root", namespace="team")
        now += 29
        await world.controller.reconcile(KEY)
        assert len(world.server.writes) == 2
        now += 1
        await world.controller.reconcile(KEY)  # neither creation nor deletion was ever shown
        assert world.quota()["spec"]["min"] == {"cpu": "8", "memory": "32Gi"}
        await world.settle()
        assert not world.controller._own_quotas and not world.controller._own_profiles

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


@pytest.mark.parametrize(
    ("spec", "metadata", "expected"),
    [
        ({"nodeSelector": None}, {}, "UpdateQuotaFailed: spec.nodeSelector: nodeSelector is miss"),
        (
            {"nodeSelector": {"matchExpressions": [{"key": "x", "operator": "Near"}]}},
            {},
            "UpdateQuotaFailed: spec.nodeSelector: ",
        ),
        (
            {},
            {"annotations": {f"{PREFIX}/resource-keys": "cpu"}},
            f'InvalidResourceKeys: ElasticQuotaProfile team/pool: metadata.annotations["{PREFIX}',
        ),
    ],
)
def test_a_problem_of_a_profile_is_reported_as_an_event(
    spec: dict[str, Any], metadata: dict[str, Any], expected: str
) -> None:
    plain = profile(**spec)
    plain["metadata"] |= metadata

    async def check(world: World) -> None:
        world.show()
        await world.controller.reconcile(KEY)
        assert len(world.events) == 1 and world.events[0].startswith(expected)

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, plain))


@pytest.mark.parametrize(("exists", "reason"), [(False, "Create"), (True, "Update")])
def test_a_refused_write_is_reported_as_an_event_and_retried(exists: bool, reason: str) -> None:
    async def check(world: World) -> None:
        if exists:
            await world.settle()
            world.server.put(NODES, node("n2"))
        world.show()
        path = ELASTIC_QUOTAS.path(namespace="team", name="root" if exists else "")
        world.server.refuse[path] = 403
        with pytest.raises(ApiError):
            await world.controller.reconcile(KEY)
        assert [event.partition(":")[0] for event in world.events] == [f"{reason}QuotaFailed"]
        world.server.refuse.clear()
        await world.settle()
        cpu = {"cpu": "16"} if exists else {"cpu": "8"}
        assert cpu.items() <= world.quota()["spec"]["min"].items()

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))


def test_which_changes_of_quotas_and_nodes_concern_a_profile() -> None:
    async def check(world: World) -> None:
        await world.settle()
        queue = world.controller.queue
        world.show()
        while queue.due:
            queue.take()
        world.server.put(ELASTIC_QUOTAS, {"metadata": {"name": "x", "namespace": "team"}})
        world.show()
        assert not queue.due  # another quota, of no profile
        world.server.put(ELASTIC_QUOTAS, {**world.quota(), "spec": {}})
        world.show()
        assert queue.take() == KEY and not queue.due
        queue.forget(KEY)
        times = queue.remembered
        heartbeat = world.server.get(NODES, "n1")
        world.server.put(NODES, {**heartbeat, "metadata": {**heartbeat["metadata"], "a": "b"}})
        world.show()
        assert queue.remembered == times
        heartbeat = world.server.get(NODES, "n1")
        reserved = {"node.koordinator.sh/reservation": '{"resources":{"cpu":"1"}}'}
        metadata = {**heartbeat["metadata"], "annotations": reserved}
        world.server.put(NODES, {**heartbeat, "metadata": metadata})
        world.show()
        assert queue.remembered > times
        await world.settle()
        assert world.quota()["spec"]["min"]["cpu"] == "7"
        queue.forget(KEY)
        times = queue.remembered
        world.server.remove(NODES, "n1")
        world.show()
        assert queue.remembered > times

    run(check, (NODES, node("n1")), (QUOTA_PROFILES, profile()))
