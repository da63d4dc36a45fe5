"""The controller of Reservations over an API server in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from apis.meta import format_time
from apis.scheduling import Reservation
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.controllers.reservations import ControllerSettings, ReservationController
from cluster.scheduler.sources.bookings import reservation_of
from kube.cache import Cache
from kube.resources import NODES, PODS, RESERVATIONS
from tests.cluster.fake_api import FakeApi, in_virtual_time

BORN = 1_800_000_000.0
HOUR = 3600.0
SETTINGS = ControllerSettings(
    collect_after_s=24 * HOUR,
    collect_every_s=60.0,
    look_again_s=60.0,
    clean_owners=False,
    pending_expire=True,
)
USES = "scheduling.koordinator.sh/reservation-allocated"


class Bed:
    """A controller whose clock is that of the loop. `after`: how late its caches are."""

    def __init__(self, settings: ControllerSettings, after: float) -> None:
        self.api = FakeApi()
        client = self.api.client()
        self.reservations = Cache(client, RESERVATIONS, Reservation)
        self.pods = Cache(client, PODS, SchedulingPod)
        self.nodes = Cache(client, NODES, SchedulingNode)
        self.began = asyncio.get_running_loop().time()
        self.controller = ReservationController(
            client,
            settings,
            reservations=self.reservations,
            pods=self.pods,
            nodes=self.nodes,
            reservation_of=reservation_of,
            clock=lambda: BORN + asyncio.get_running_loop().time() - self.began,
        )
        self.api.put(NODES, {"metadata": {"name": "n"}})
        self.api.follow(self.reservations, self.pods, self.nodes, after=after)

    def make(self, name: str = "r", *, once: bool = False, ttl: str = "24h") -> str:
        """Store an Available reservation of 4 CPUs; return its UID."""
        stored = self.api.put(
            RESERVATIONS,
            {
                "metadata": {
                    "name": name,
                    "creationTimestamp": format_time(datetime.fromtimestamp(BORN, UTC)),
                },
                "spec": {"template": {}, "owners": [{}], "ttl": ttl, "allocateOnce": once},
                "status": {"phase": "Available", "nodeName": "n", "allocatable": {"cpu": "4"}},
            },
        )
        uid: str = stored["metadata"]["uid"]
        return uid

    def make_pod(self, name: str, uid: str, *, node: str = "n", phase: str = "Running") -> None:
        annotations = {USES: f'{{"name":"r","uid":"{uid}"}}'}
        resources = {"requests": {"cpu": "1"}}
        self.api.put(
            PODS,
            {
                "metadata": {"name": name, "namespace": "default", "annotations": annotations},
                "spec": {"nodeName": node, "containers": [{"name": "c", "resources": resources}]},
                "status": {"phase": phase},
            },
        )

    def status(self, name: str = "r") -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(RESERVATIONS, name)["status"]
        return found

    def owners(self) -> list[str]:
        return [one["name"] for one in self.status().get("currentOwners", [])]


def play(
    scenario: Callable[[Bed], Awaitable[None]],
    settings: ControllerSettings = SETTINGS,
    *,
    after: float = 0.01,
) -> None:
    async def run() -> None:
        bed = Bed(settings, after)
        task = asyncio.create_task(bed.controller.run())
        try:
            await scenario(bed)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not bed.controller.queue.faults.count

    in_virtual_time(run)


def test_the_status_follows_the_pods_that_use_a_reservation() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.make_pod("b", uid)
        bed.make_pod("a", uid)
        bed.make_pod("elsewhere", uid, node="other")
        bed.make_pod("unbound", uid, node="")
        bed.make_pod("ended", uid, phase="Failed")
        bed.make_pod("of another", "uid-of-another")
        await asyncio.sleep(2)
        assert bed.owners() == ["a", "b"]
        assert bed.status()["allocated"] == {"cpu": "2"}
        writes = len(bed.api.writes)
        await asyncio.sleep(HOUR)
        assert len(bed.api.writes) == writes
        # A pod on another node was to be taken over there, where the reservation did not go.
        stored = bed.api.get(PODS, "elsewhere", namespace="default")
        assert USES not in stored["metadata"]["annotations"]
        bed.api.remove(PODS, "a", namespace="default")
        bed.make_pod("b", uid, phase="Succeeded")
        await asyncio.sleep(2)
        assert bed.owners() == []
        assert bed.status()["phase"] == "Available"

    play(scenario)


@pytest.mark.parametrize("after", [0.01, 5.0])
def test_one_for_a_single_owner_succeeds_once_and_goes_later(after: float) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make(once=True)
        bed.make_pod("a", uid)
        await asyncio.sleep(60)
        assert bed.status()["phase"] == "Succeeded"
        assert bed.owners() == ["a"]
        done = [body for _, _, body in bed.api.writes if "phase" in body.get("status", {})]
        # With late caches, later tries name a version that is not the newest and change nothing.
        assert len({body["metadata"]["resourceVersion"] for body in done}) == 1
        bed.api.remove(PODS, "a", namespace="default")
        await asyncio.sleep(HOUR)
        assert bed.status()["phase"] == "Succeeded"
        assert bed.owners() == ["a"]
        await asyncio.sleep(24 * HOUR)
        assert RESERVATIONS.path(name="r") not in bed.api.objects

    play(scenario, after=after)


def test_it_expires_in_time_and_is_kept_where_that_is_wanted() -> None:
    async def scenario(bed: Bed) -> None:
        bed.make(ttl="90m")
        await asyncio.sleep(1.49 * HOUR)
        assert bed.status()["phase"] == "Available"
        await asyncio.sleep(0.05 * HOUR)
        assert bed.status()["phase"] == "Failed"
        assert bed.status()["conditions"][0]["reason"] == "Expired"
        await asyncio.sleep(1000 * HOUR)
        assert bed.status()["phase"] == "Failed"

    play(scenario, replace(SETTINGS, collect_after_s=None))


def test_a_longer_ttl_that_comes_in_time_counts() -> None:
    async def scenario(bed: Bed) -> None:
        bed.make(ttl="1h")
        await asyncio.sleep(HOUR / 2)
        stored = bed.api.get(RESERVATIONS, "r")
        bed.api.put(RESERVATIONS, {**stored, "spec": {**stored["spec"], "ttl": "3h"}})
        await asyncio.sleep(2 * HOUR)
        assert bed.status()["phase"] == "Available"
        await asyncio.sleep(HOUR)
        assert bed.status()["phase"] == "Failed"

    play(scenario)


def test_it_ends_with_its_node_but_not_because_the_node_was_not_seen_yet() -> None:
    async def scenario(bed: Bed) -> None:
        bed.make()
        await asyncio.sleep(1)
        bed.nodes.take(b'{"type":"DELETED","object":{"metadata":{"name":"n"}}}')
        await asyncio.sleep(1)
        assert bed.status()["phase"] == "Available"
        bed.api.remove(NODES, "n")
        await asyncio.sleep(HOUR)
        assert bed.status()["phase"] == "Failed"
        assert bed.status()["conditions"][0]["message"] == "Node n does not exist any more."

    play(scenario)


@pytest.mark.parametrize("code", [409, 429, 500, 403])
def test_a_write_that_is_refused_is_tried_again(code: int) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.api.refuse[RESERVATIONS.path(name="r")] = code
        bed.make_pod("a", uid)
        await asyncio.sleep(30)
        assert "currentOwners" not in bed.status()
        assert len(bed.api.writes) < 30
        del bed.api.refuse[RESERVATIONS.path(name="r")]
        await asyncio.sleep(90)
        assert bed.owners() == ["a"]

    play(scenario)


@pytest.mark.parametrize("clean", [True, False])
def test_owners_of_a_deleted_reservation_lose_their_annotation_where_that_is_wanted(
    clean: bool,
) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.make_pod("a", uid)
        await asyncio.sleep(1)
        bed.api.remove(RESERVATIONS, "r")
        await asyncio.sleep(1)
        stored = bed.api.get(PODS, "a", namespace="default")
        assert (USES not in stored["metadata"]["annotations"]) is clean

    play(scenario, replace(SETTINGS, clean_owners=clean))


def test_one_that_is_made_again_under_its_name_has_its_own_owners() -> None:
    async def scenario(bed: Bed) -> None:
        first = bed.make()
        bed.make_pod("a", first)
        await asyncio.sleep(1)
        bed.api.remove(RESERVATIONS, "r")
        second = bed.make()
        assert second != first
        await asyncio.sleep(1)
        assert bed.owners() == []
        bed.make_pod("b", second)
        await asyncio.sleep(1)
        assert bed.owners() == ["b"]

    play(scenario)


def test_the_status_names_who_uses_a_reservation_and_a_pod_without_a_node_does_not() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.make_pod("a", uid)
        await asyncio.sleep(1)
        stored = bed.api.get(PODS, "a", namespace="default")
        assert bed.status()["currentOwners"] == [
            {"namespace": "default", "name": "a", "uid": stored["metadata"]["uid"]}
        ]

    play(scenario)


def test_a_write_about_one_that_is_gone_is_not_repeated() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        await asyncio.sleep(1)
        bed.api.refuse[RESERVATIONS.path(name="r")] = 404
        writes = len(bed.api.writes)
        bed.make_pod("a", uid)
        await asyncio.sleep(59)
        assert len(bed.api.writes) <= writes + 1

    play(scenario)


@pytest.mark.parametrize("code", [404, 409, 422])
def test_a_pod_that_cannot_be_cleaned_keeps_its_annotation_and_holds_up_nothing(code: int) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.make_pod("a", uid)
        bed.make_pod("b", uid)
        await asyncio.sleep(1)
        bed.api.refuse[PODS.path(namespace="default", name="a")] = code
        bed.api.remove(RESERVATIONS, "r")
        await asyncio.sleep(1)
        for name, cleaned in (("a", False), ("b", True)):
            stored = bed.api.get(PODS, name, namespace="default")
            assert (USES not in stored["metadata"]["annotations"]) is cleaned

    play(scenario, replace(SETTINGS, clean_owners=True))


@pytest.mark.parametrize("expire", [True, False])
def test_one_without_a_node_expires_where_that_is_wanted(expire: bool) -> None:
    async def scenario(bed: Bed) -> None:
        bed.make(ttl="1h")
        stored = bed.api.get(RESERVATIONS, "r")
        bed.api.put(RESERVATIONS, {**stored, "status": {"phase": "Pending"}})
        await asyncio.sleep(1.1 * HOUR)
        assert bed.status()["phase"] == ("Failed" if expire else "Pending")

    play(scenario, replace(SETTINGS, pending_expire=expire))


def test_how_often_it_is_looked_at_follows_the_settings() -> None:
    """A clock may jump: the end is not waited for in one go."""

    async def scenario(bed: Bed) -> None:
        bed.make()
        await asyncio.sleep(0.5)
        for _ in range(2):
            assert await bed.controller._look_at("r") == 30.0
        stored = bed.api.get(RESERVATIONS, "r")
        bed.api.put(RESERVATIONS, {**stored, "status": {"phase": "Failed"}})
        await asyncio.sleep(0.5)
        assert await bed.controller._look_at("r") == 7.0
        assert await bed.controller._look_at("unknown") is None

    play(scenario, replace(SETTINGS, look_again_s=30.0, collect_every_s=7.0))


@pytest.mark.parametrize(("phase", "cleaned"), [("Pending", False), ("Failed", True)])
def test_pods_lose_the_annotation_once_it_is_known_that_they_are_not_used(
    phase: str, cleaned: bool
) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        stored = bed.api.get(RESERVATIONS, "r")
        bed.api.put(RESERVATIONS, {**stored, "status": {"phase": phase}})
        bed.make_pod("a", uid)
        await asyncio.sleep(2)
        annotations = bed.api.get(PODS, "a", namespace="default")["metadata"]["annotations"]
        assert (USES not in annotations) is cleaned

    play(scenario)
