"""Profiles for pods that wait for a node: which pods are patched, how, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from apis.core import Namespace, Pod
from apis.profile import ClusterColocationProfile
from cluster.manager.colocation_profile import (
    ColocationProfileController,
    ProfileControllerSettings,
)
from kube.cache import Cache
from kube.resources import NAMESPACES, PODS, PROFILES
from tests.cluster.fake_api import FakeApi, in_virtual_time

MANAGED = {"config.koordinator.sh/controller-managed": "true"}


class World:
    def __init__(self, **settings: Any) -> None:
        self.server = FakeApi()
        client = self.server.client()
        self.profiles = Cache(client, PROFILES, ClusterColocationProfile)
        self.pods = Cache(client, PODS, Pod)
        self.namespaces = Cache(client, NAMESPACES, Namespace)
        self.controller = ColocationProfileController(
            client,
            self.profiles,
            self.pods,
            self.namespaces,
            self.pods.index(lambda pod: (pod.spec.node_name,)),
            ProfileControllerSettings(**settings),
        )
        self.server.put(NAMESPACES, {"metadata": {"name": "default", "labels": {"kind": "x"}}})

    def profile(self, *, labels: dict[str, str] | None = None, **spec: Any) -> None:
        body = {"selector": {"matchLabels": {"team": "ml"}}, "labels": {"seen": "yes"}, **spec}
        meta = {"name": "p", "labels": MANAGED if labels is None else labels}
        self.server.put(PROFILES, {"metadata": meta, "spec": body})

    def pod(
        self,
        name: str = "a",
        *,
        node: str = "",
        phase: str = "Pending",
        labels: dict[str, str] | None = None,
    ) -> None:
        meta = {"name": name, "namespace": "default", "labels": labels or {"team": "ml"}}
        plain = {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": phase}}
        self.server.put(PODS, plain)

    def labels(self, name: str = "a") -> dict[str, str]:
        found: dict[str, str] = self.server.get(PODS, name, namespace="default")["metadata"][
            "labels"
        ]
        return found

    async def round(self) -> float | None:
        self.server.show(self.profiles, self.pods, self.namespaces)
        return await self.controller.reconcile("p")


def live(life: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        await life(World(**settings))

    in_virtual_time(main)


SELECTED: tuple[tuple[dict[str, Any], dict[str, Any], bool], ...] = (
    # profile, pod, patched
    ({}, {}, True),
    ({"labels": {}}, {}, False),
    ({"labels": {"config.koordinator.sh/controller-managed": "false"}}, {}, False),
    ({}, {"node": "n1"}, False),
    ({}, {"phase": "Running"}, False),
    ({}, {"labels": {"team": "web"}}, False),
    # At admission an empty selector selects all pods; here it selects none.
    ({"selector": {}}, {}, False),
    ({"selector": None}, {}, False),
    ({"namespaceSelector": {"matchLabels": {"kind": "x"}}}, {}, True),
    ({"namespaceSelector": {"matchLabels": {"kind": "y"}}}, {}, False),
    ({"namespaceSelector": {}}, {}, True),
    ({"selector": {"matchExpressions": [{"key": "team", "operator": "Near"}]}}, {}, False),
    ({"probability": "0%"}, {}, False),
    ({"probability": "100%"}, {}, True),
)


@pytest.mark.parametrize(("profile", "pod", "patched"), SELECTED)
def test_which_pods_a_profile_takes(
    profile: dict[str, Any], pod: dict[str, Any], patched: bool
) -> None:
    async def life(world: World) -> None:
        world.profile(**profile)
        world.pod(**pod)
        await world.round()
        assert ("seen" in world.labels()) is patched
        assert len(world.server.writes) == patched

    live(life)


def test_a_pod_whose_namespace_is_not_known_is_left_to_the_next_round() -> None:
    async def life(world: World) -> None:
        world.profile(namespaceSelector={"matchLabels": {"kind": "x"}})
        world.pod()
        world.server.show(world.profiles, world.pods)
        await world.controller.reconcile("p")
        assert "seen" not in world.labels()
        await world.round()
        assert "seen" in world.labels()

    live(life)


def test_all_profiles_are_managed_where_the_flag_says_so() -> None:
    async def life(world: World) -> None:
        world.profile(labels={})
        world.pod()
        await world.round()
        assert "seen" in world.labels()

    live(life, by_default=True)


def test_a_pod_is_patched_once_for_each_version_of_a_profile() -> None:
    async def life(world: World) -> None:
        world.profile()
        world.pod()
        assert await world.round() == 7
        assert await world.round() == 7
        assert len(world.server.writes) == 1
        world.server.put(PODS, {**world.server.get(PODS, "a", namespace="default")})
        edited = world.server.get(PODS, "a", namespace="default")
        edited = {**edited, "metadata": {**edited["metadata"], "labels": {"team": "ml"}}}
        world.server.put(PODS, edited)
        await world.round()
        assert len(world.server.writes) == 1  # what a user takes off stays off
        world.profile(labels={**MANAGED, "changed": "x"})
        await world.round()
        assert len(world.server.writes) == 2

    live(life, interval=7)


def test_after_its_time_a_pod_is_patched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("cluster.manager.colocation_profile.time", clock)

    async def life(world: World) -> None:
        world.profile()
        world.pod()
        await world.round()
        edited = world.server.get(PODS, "a", namespace="default")
        edited = {**edited, "metadata": {**edited["metadata"], "labels": {"team": "ml"}}}
        world.server.put(PODS, edited)
        clock.now += 60
        await world.round()
        assert "seen" not in world.labels()
        clock.now += 1
        await world.round()
        assert "seen" in world.labels()
        clock.now += 61
        world.server.remove(PODS, "a", namespace="default")
        await world.round()
        assert world.controller._done == {}

    live(life, forget_after=60)


@pytest.mark.parametrize(("code", "tries"), [(403, 1), (422, 1), (404, 3), (409, 3)])
def test_a_refused_patch_is_not_repeated_but_a_conflict_is(code: int, tries: int) -> None:
    async def life(world: World) -> None:
        world.profile()
        world.pod()
        world.server.refuse[PODS.path(namespace="default", name="a")] = code
        for _ in range(3):
            await world.round()
        assert len(world.server.writes) == tries

    live(life)


def test_patches_are_as_many_as_the_flags_allow() -> None:
    async def life(world: World) -> None:
        world.profile()
        for number in range(25):
            world.pod(f"p{number}")
        started = asyncio.get_running_loop().time()
        await world.round()
        assert len(world.server.writes) == 25
        assert asyncio.get_running_loop().time() - started == pytest.approx((25 - 5) / 2, abs=0.6)

    live(life, qps=2, burst=5)


def test_a_deleted_profile_is_not_requeued() -> None:
    async def life(world: World) -> None:
        assert await world.round() is None
        world.profile()
        world.pod()
        stored = world.server.get(PROFILES, "p")
        ending = {**stored["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
        world.server.put(PROFILES, {**stored, "metadata": ending})
        assert await world.round() is None
        assert world.server.writes == []

    live(life)


def test_a_pod_without_labels_is_selected_by_what_it_lacks() -> None:
    async def life(world: World) -> None:
        absent = {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}
        world.profile(selector=absent, labels=None, annotations={"seen": "yes"})
        stored = world.server.get(PROFILES, "p")
        spec = {key: value for key, value in stored["spec"].items() if key != "labels"}
        world.server.put(PROFILES, {**stored, "spec": spec})
        meta = {"name": "bare", "namespace": "default"}
        world.server.put(PODS, {"metadata": meta, "spec": {}, "status": {"phase": "Pending"}})
        await world.round()
        after = world.server.get(PODS, "bare", namespace="default")["metadata"]
        assert after["annotations"] == {"seen": "yes"} and not after.get("labels")

    live(life)


def test_class_and_sub_priority_of_a_pod_stay_as_they_are() -> None:
    async def life(world: World) -> None:
        world.profile(
            qosClass="BE", koordinatorPriority=5500, patch={"metadata": {"annotations": {"x": "y"}}}
        )
        world.pod("without")
        marks = {"team": "ml", "koordinator.sh/qosClass": "LS", "koordinator.sh/priority": "1"}
        world.pod("with", labels=marks)
        await world.round()
        assert world.labels("without") == {"team": "ml", "seen": "yes"}
        assert world.labels("with") == {**marks, "seen": "yes"}
        stored = world.server.get(PODS, "with", namespace="default")
        assert stored["metadata"]["annotations"] == {"x": "y"}
        assert all("resourceVersion" in body["metadata"] for _, _, body in world.server.writes)

    live(life)


def test_every_event_of_a_profile_requeues_it() -> None:
    async def life(world: World) -> None:
        queue = world.controller.queue
        changes: list[Callable[[], None]] = [
            world.profile,
            lambda: world.profile(labels={}),
            lambda: world.server.remove(PROFILES, "p"),
        ]
        for change in changes:
            change()
            world.server.show(world.profiles)
            assert queue.take() == "p" and not queue.due

    live(life)
