"""Binding of volumes beside an API server that loses answers, conflicts, and gives up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from apis.scheduling_pod import SchedulingPod
from apis.storage import PersistentVolume, PersistentVolumeClaim
from cluster.scheduler.binding import pauses
from cluster.scheduler.binding import volumes as under_test
from cluster.scheduler.binding.placement import Placement, Refused, Why
from cluster.scheduler.binding.volumes import VolumeBinder, VolumeBindingCounts
from cluster.scheduler.tables.booking import PlannedVolumes
from kube.cache import Cache
from kube.client import ApiError, Client, Unreachable
from kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from tests.beds.apiserver import eventually
from tests.cluster.fake_api import merged
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.volumes.making import claim_json, volume_json

Tree = dict[str, Any]

_SELECTED = "volume.kubernetes.io/selected-node"
_COMPLETED = "pv.kubernetes.io/bind-completed"


class _Bed:
    """Volumes and claims in an API server that fails as a test says, and a binder that sees them.

    faults: one for each of the next writes: None, "before" or "after" for an answer that is lost
    before or after the write is carried out, or an HTTP status.
    """

    def __init__(self, *, timeout: float = 30.0) -> None:
        self.stored: dict[str, Tree] = {}
        self.faults: deque[str | int | None] = deque()
        self.writes: list[tuple[str, Tree]] = []
        self.version = 10
        self.bound: list[Placement] = []
        self.refused: list[Refused] = []
        self.reachable: bool | None = True
        self.pod: SchedulingPod | None = make_pod("p")
        client = cast(Client, self)
        self.claims: Cache[PersistentVolumeClaim] = Cache(
            client, PERSISTENT_VOLUME_CLAIMS, PersistentVolumeClaim
        )
        self.volumes: Cache[PersistentVolume] = Cache(client, PERSISTENT_VOLUMES, PersistentVolume)
        self.binder = VolumeBinder(
            client,
            bind=self.bound.append,
            refuse=lambda placement, refused: self.refused.append(refused),
            claims=self.claims,
            volumes=self.volumes,
            pod_of=lambda key: self.pod,
            reaches=lambda volume, node: self.reachable,
            timeouts={"": timeout},
        )

    # --- the API server --------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, *, body: bytes = b"", tries: int = 0, content_type: str = ""
    ) -> bytes:
        await asyncio.sleep(0)
        key = path.rsplit("/", 1)[-1]
        if method == "GET":
            return self._answer(key)
        fault = self.faults.popleft() if self.faults else None
        if fault == "before":
            raise Unreachable("the test drops this request")
        if isinstance(fault, int):
            raise _error(fault)
        patch = msgspec.json.decode(body)
        self.writes.append((key, patch))
        meta = self.stored[key]["metadata"] if key in self.stored else {}
        if meta and patch["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise _error(409)
        self._answer(key)
        self.change(key, patch, seen=False)
        if fault == "after":
            raise Unreachable("the test drops this answer")
        return self._answer(key)

    def _answer(self, key: str) -> bytes:
        if key not in self.stored:
            raise _error(404)
        return msgspec.json.encode(self.stored[key])

    def put(self, tree: Tree) -> None:
        """Store an object, and show it."""
        name = tree["metadata"]["name"]
        tree["metadata"]["uid"] = f"uid-{name}"
        self.stored[name] = tree
        self.change(name, {})

    def change(self, key: str, patch: Tree, *, seen: bool = True) -> None:
        self.version += 1
        stamp = {"metadata": {"resourceVersion": str(self.version)}}
        self.stored[key] = merged(merged(self.stored[key], patch), stamp)
        if seen:
            self.show(key)

    def show(self, *keys: str) -> None:
        """Have the caches see objects as they are stored now."""
        for key in keys or tuple(self.stored):
            self._see("MODIFIED", self.stored[key])

    def delete(self, key: str) -> None:
        self._see("DELETED", self.stored.pop(key))

    def _see(self, kind: str, tree: Tree) -> None:
        cache: Cache[Any] = self.claims if "resources" in tree["spec"] else self.volumes
        cache.take(msgspec.json.encode({"type": kind, "object": tree}))

    def controller_binds(self, claim: str, volume: str) -> None:
        self.change(
            claim,
            {"metadata": {"annotations": {_COMPLETED: "yes"}}, "spec": {"volumeName": volume}},
        )


def _error(status: int) -> ApiError:
    return ApiError(status=status, reason="Fault", message="the test wants it", what="a test")


def _placement(*, binds: bool = True, provisions: bool = False) -> Placement:
    planned = PlannedVolumes(
        binds=(("default/c", "v"),) if binds else (),
        provisions=("default/d",) if provisions else (),
    )
    return Placement("default", "p", "uid-default-p", "n", volumes=planned)


def _play(scenario: Callable[[_Bed], Awaitable[None]], *, timeout: float = 30.0) -> _Bed:
    async def run() -> _Bed:
        bed = _Bed(timeout=timeout)
        bed.put(claim_json("c"))
        bed.put(claim_json("d"))
        bed.put(volume_json("v"))
        try:
            await scenario(bed)
        finally:
            await bed.binder.stop()
        assert bed.binder.in_flight == 0
        return bed

    return asyncio.run(run())


async def _until(check: Callable[[], object]) -> None:
    await eventually(check, every=0.001)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(under_test, "_LOOK_S", 0.01)


def test_claims_are_written_and_bound_before_the_pod() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.binder.submit(_placement(provisions=True))
        await _until(lambda: len(bed.writes) == 2)
        # Each names the object and the version that it was made for.
        of_claim = {"namespace": "default", "name": "c", "uid": "uid-c", "resourceVersion": "11"}
        kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        by_controller = {"pv.kubernetes.io/bound-by-controller": "yes"}
        of_volume = {"uid": "uid-v", "resourceVersion": "13", "annotations": by_controller}
        selected = {"uid": "uid-d", "resourceVersion": "12", "annotations": {_SELECTED: "n"}}
        assert bed.writes == [
            ("v", {"metadata": of_volume, "spec": {"claimRef": of_claim | kind}}),
            ("d", {"metadata": selected}),
        ]
        reference = bed.stored["v"]["spec"]["claimRef"]
        assert (reference["name"], reference["uid"]) == ("c", "uid-c")
        assert bed.stored["v"]["metadata"]["annotations"] == {
            "pv.kubernetes.io/bound-by-controller": "yes"
        }
        assert bed.stored["d"]["metadata"]["annotations"][_SELECTED] == "n"
        bed.show()
        bed.controller_binds("c", "v")
        await asyncio.sleep(0.05)
        assert bed.bound == []
        bed.put(volume_json("made"))
        bed.controller_binds("d", "made")
        await _until(lambda: bed.bound)
        assert bed.refused == []
        assert bed.binder.counts == VolumeBindingCounts(bound=1)

    _play(scenario)


@pytest.mark.parametrize(
    "faults",
    [
        ["before"],
        ["after"],
        [409],
        [503, 503, "after"],
        # What the server did not take up is no failure, and an absence begins the count again.
        [429, 401] * 6,
        [*[503] * 5, "before", *[503] * 5],
    ],
)
def test_a_lost_or_failed_write_has_a_certain_effect(faults: list[str | int]) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend(faults)
        bed.binder.submit(_placement())
        await _until(lambda: "claimRef" in bed.stored["v"]["spec"] and not bed.faults)
        bed.show()
        bed.controller_binds("c", "v")
        await _until(lambda: bed.bound)
        # One write was carried out, and none after it.
        assert len(bed.writes) == 1

    _play(scenario)


def test_a_volume_that_was_given_to_another_claim_is_not_taken() -> None:
    async def scenario(bed: _Bed) -> None:
        other = {"namespace": "default", "name": "d", "uid": "uid-d"}
        bed.change("v", {"spec": {"claimRef": other}}, seen=False)
        bed.binder.submit(_placement())
        await _until(lambda: bed.refused)
        (refused,) = bed.refused
        assert refused.why is Why.CONFLICT
        assert "belongs to claim default/d, not to default/c" in refused.message
        assert bed.stored["v"]["spec"]["claimRef"] == other

    _play(scenario)


def test_another_change_of_the_volume_is_no_obstacle() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change("v", {"metadata": {"labels": {"a": "b"}}}, seen=False)
        bed.binder.submit(_placement())
        await _until(lambda: "claimRef" in bed.stored["v"]["spec"])
        assert bed.stored["v"]["metadata"]["labels"] == {"a": "b"}

    _play(scenario)


def test_a_reference_that_a_user_set_is_completed_and_stays_the_users() -> None:
    async def scenario(bed: _Bed) -> None:
        reference = {"namespace": "default", "name": "c"}
        bed.change("v", {"spec": {"claimRef": reference}})
        bed.binder.submit(_placement())
        await _until(lambda: bed.stored["v"]["spec"]["claimRef"].get("uid"))
        assert "annotations" not in bed.stored["v"]["metadata"]

    _play(scenario)


def test_what_was_written_before_a_restart_is_not_written_again() -> None:
    async def scenario(bed: _Bed) -> None:
        reference = {"namespace": "default", "name": "c", "uid": "uid-c"}
        bed.change("v", {"spec": {"claimRef": reference}})
        bed.change("d", {"metadata": {"annotations": {_SELECTED: "n"}}})
        bed.binder.submit(_placement(provisions=True))
        await asyncio.sleep(0.02)
        bed.put(volume_json("made"))
        bed.controller_binds("c", "v")
        bed.controller_binds("d", "made")
        await _until(lambda: bed.bound)
        assert bed.writes == []

    _play(scenario)


async def _selected(bed: _Bed) -> None:
    bed.binder.submit(_placement(binds=False, provisions=True))
    await _until(lambda: _SELECTED in bed.stored["d"]["metadata"]["annotations"])


def test_a_failed_provisioning_gives_the_node_back() -> None:
    async def scenario(bed: _Bed) -> None:
        await _selected(bed)
        # An event from before the write says nothing.
        await asyncio.sleep(0.05)
        assert bed.refused == []
        bed.change("d", {"metadata": {"annotations": {_SELECTED: None}}})
        await _until(lambda: bed.refused)
        assert bed.refused[0].message == 'binding volumes: provisioning failed for PVC "d"'

    _play(scenario)


def test_a_volume_that_cannot_be_reached_gives_the_node_back() -> None:
    async def scenario(bed: _Bed) -> None:
        await _selected(bed)
        bed.show()
        bed.reachable = False
        bed.put(volume_json("made"))
        bed.controller_binds("d", "made")
        await _until(lambda: bed.refused)
        assert 'pv "made" node affinity doesn\'t match node "n"' in bed.refused[0].message

    _play(scenario)


def test_a_node_that_is_gone_ends_the_waiting() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.binder.submit(_placement())
        await _until(lambda: bed.writes)
        bed.reachable = None
        bed.show()
        await _until(lambda: bed.refused)
        assert 'failed to get node "n"' in bed.refused[0].message

    _play(scenario)


def test_a_reference_that_is_taken_back_gives_the_node_back() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.binder.submit(_placement())
        await _until(lambda: bed.writes)
        bed.show()
        bed.change("v", {"spec": {"claimRef": None}})
        await _until(lambda: bed.refused)
        assert bed.refused[0].message == 'binding volumes: ClaimRef got reset for pv "v"'

    _play(scenario)


@pytest.mark.parametrize("key", ["c", "v"])
def test_an_object_that_is_gone_gives_the_node_back(key: str) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.binder.submit(_placement())
        await _until(lambda: bed.writes)
        bed.show()
        bed.delete(key)
        await _until(lambda: bed.refused)
        assert "not found" in bed.refused[0].message

    _play(scenario)


def test_a_pod_that_is_gone_ends_the_waiting() -> None:
    async def scenario(bed: _Bed) -> None:
        await _selected(bed)
        bed.pod = None
        await _until(lambda: bed.refused)
        assert bed.refused[0].why is Why.DELETED

    _play(scenario)


def test_claims_that_are_not_bound_in_time_are_named() -> None:
    async def scenario(bed: _Bed) -> None:
        await _selected(bed)
        await _until(lambda: bed.refused)
        message = "binding volumes: claims are not bound after 0.1 s: default/d"
        assert bed.refused[0].message == message

    _play(scenario, timeout=0.1)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (500, Why.FAILING),
        (409, Why.FAILING),
        (403, Why.FORBIDDEN),
        (400, Why.INVALID),
        (422, Why.INVALID),
        (404, Why.CONFLICT),
    ],
)
def test_a_server_that_refuses_gives_the_node_back(status: int, why: Why) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend([status] * 6)
        bed.binder.submit(_placement())
        await _until(lambda: bed.refused)
        assert bed.refused[0].why is why
        assert bed.refused[0].message.startswith("binding volumes: PersistentVolume v")
        assert bed.bound == []
        assert bed.binder.counts == VolumeBindingCounts(refused=1)

    _play(scenario)


def test_a_server_that_is_away_is_waited_for() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend(["before"] * 30)
        bed.binder.submit(_placement())
        await _until(lambda: bed.writes)
        assert bed.refused == []

    _play(scenario)


def test_all_claims_that_are_not_bound_in_time_are_named() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.binder.submit(_placement(provisions=True))
        await _until(lambda: bed.refused)
        message = "binding volumes: claims are not bound after 0.05 s: default/c, default/d"
        assert bed.refused == [Refused(Why.FAILING, message)]

    _play(scenario, timeout=0.05)


@pytest.mark.parametrize("provisions", [False, True])
def test_a_claim_that_is_gone_before_the_first_write_is_named(provisions: bool) -> None:
    async def scenario(bed: _Bed) -> None:
        name = "d" if provisions else "c"
        bed.delete(name)
        bed.binder.submit(_placement(binds=not provisions, provisions=provisions))
        await _until(lambda: bed.refused)
        (refused,) = bed.refused
        assert refused.why is Why.CONFLICT
        assert "not found" in refused.message and name in refused.message
        assert bed.writes == []

    _play(scenario)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, "is being deleted"),
        ({"metadata": {"annotations": {_SELECTED: "m"}}}, "was given m by another decision"),
        ({"spec": {"volumeName": "w"}}, "was given w by another decision"),
    ],
)
def test_a_claim_that_another_decided_about_is_not_written(change: Tree, text: str) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change("d", change)
        bed.binder.submit(_placement(binds=False, provisions=True))
        await _until(lambda: bed.refused)
        (refused,) = bed.refused
        assert refused.why is Why.CONFLICT
        assert refused.message == f'binding volumes: persistentvolumeclaim "d" {text}'
        assert bed.writes == []

    _play(scenario)


def test_defects_are_outcomes_and_counted() -> None:
    async def scenario(bed: _Bed) -> None:
        def broken(volume: str, node: str) -> bool:
            raise ValueError(f"{volume} {node}")

        def refused(placement: Placement, refused: Refused) -> None:
            bed.refused.append(refused)
            raise ValueError("a defect in taking it")

        bed.binder._reaches, bed.binder._refuse = broken, refused
        bed.binder.submit(_placement())
        await _until(lambda: bed.writes)
        bed.show()
        await _until(lambda: not bed.binder.in_flight)
        assert bed.refused == [Refused(Why.FAILING, "binding volumes: ValueError: v n")]
        assert bed.binder.faults.count == 2

    _play(scenario)


def test_a_claim_may_take_as_long_as_the_profile_of_its_pod_says() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.pod = make_pod("p", schedulerName="other")
        await _selected(bed)
        await asyncio.sleep(0.05)
        assert bed.refused == []

    _play(scenario, timeout=0.01)
