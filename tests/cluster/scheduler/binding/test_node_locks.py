"""Locks of nodes beside an API server that loses answers, and pods that hold them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding import node_locks as under_test
from cluster.scheduler.binding import pauses
from cluster.scheduler.binding.lock_text import NodeLock, lock_text, parse_lock
from cluster.scheduler.binding.node_locks import NodeLockCounts, NodeLocks
from cluster.scheduler.binding.placement import Bound, Placement, Refused, Why
from kube.cache import Change, Event
from kube.client import ApiError, Client, Unreachable
from tests.beds.apiserver import eventually
from tests.cluster.fake_api import merged
from tests.cluster.scheduler.making import make_node, make_pod

Tree = dict[str, Any]
KEY = "hami.io/mutex.lock"
NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(pauses, name, 0.002)
    monkeypatch.setattr(under_test, "_LOOK_S", 0.002)
    yield


class _Bed:
    """A node, n1, and pods in an API server that fails as a test says.

    faults: one for each of the next writes: None, "before" or "after" for an answer that is lost
    before or after the write is carried out, or an HTTP status. late: pods that the cache does not
    show. deletes: a pod that goes when an answer is lost. asked: how many requests there were.
    """

    def __init__(self, held_s: float) -> None:
        self.pods: dict[str, SchedulingPod] = {}
        self.late: set[str] = set()
        self.deletes = ""
        self.annotations: dict[str, str] = {"kept": "1"}
        self.version = 10
        self.node_exists = True
        self.faults: deque[str | int | None] = deque()
        self.patches: list[Tree] = []
        self.down = False
        self.asked = 0
        self.clock = NOW
        self.steady = 0.0
        self.bound: list[Placement] = []
        self.refused: list[tuple[Placement, Refused]] = []
        self.locks = NodeLocks(
            cast(Client, self),
            bind=self.bound.append,
            refuse=lambda placement, refused: self.refused.append((placement, refused)),
            pod_of=lambda key: None if key in self.late else self.pods.get(key),
            clock=lambda: self.clock,
            steady=lambda: self.steady,
            held_s=held_s,
        )

    # --- the API server --------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, *, body: bytes = b"", tries: int = 0, content_type: str = ""
    ) -> bytes:
        await asyncio.sleep(0)
        self.asked += 1
        if self.down:
            raise Unreachable("the test keeps the server away")
        parts = path.split("/")
        if method == "GET" and "pods" in parts:
            key = f"{parts[-3]}/{parts[-1]}"
            if key not in self.pods:
                raise _error(404)
            return msgspec.json.encode(self.pods[key])
        assert parts[-1] == "n1"
        if method == "GET":
            return self._node()
        fault = self.faults.popleft() if self.faults else None
        if fault == "before":
            raise Unreachable("the test drops this request")
        if isinstance(fault, int):
            raise _error(fault)
        patch = msgspec.json.decode(body)
        if patch["metadata"]["resourceVersion"] != str(self.version):
            raise _error(409)
        self.patches.append(patch["metadata"]["annotations"])
        self.change(patch["metadata"]["annotations"])
        if fault == "after":
            self.pods.pop(self.deletes, None)
            raise Unreachable("the test drops this answer")
        return self._node()

    def _node(self) -> bytes:
        if not self.node_exists:
            raise _error(404)
        metadata = {"resourceVersion": str(self.version), "annotations": self.annotations}
        return msgspec.json.encode({"metadata": metadata})

    def change(self, annotations: dict[str, str | None]) -> None:
        self.version += 1
        self.annotations = merged(self.annotations, annotations)

    # --- pods ------------------------------------------------------------------------------------

    def pod(self, name: str, *, node: str = "", phase: str = "Pending") -> Placement:
        """Store a pod; return its placement on n1."""
        pod = make_pod(name)
        self.pods[f"default/{name}"] = msgspec.structs.replace(
            pod,
            spec=msgspec.structs.replace(pod.spec, node_name=node),
            status=msgspec.structs.replace(pod.status, phase=phase),
        )
        return Placement("default", name, pod.metadata.uid, "n1", lock=KEY)

    def submit(self, name: str) -> Placement:
        placement = self.pod(name)
        self.locks.submit(placement)
        return placement

    @property
    def lock(self) -> str:
        return self.annotations.get(KEY, "")

    @property
    def holder(self) -> str:
        held = parse_lock(self.lock)
        return "" if held is None else held.name

    def names(self) -> list[str]:
        return [placement.name for placement in self.bound]


def _error(status: int) -> ApiError:
    return ApiError(status=status, reason="Fault", message="the test wants it", what="a test")


def _text(name: str, *, age_s: float = 0.0) -> str:
    return lock_text("default", name, now_s=NOW - age_s)


def _play(scenario: Callable[[_Bed], Awaitable[None]], *, held_s: float = 1e9) -> _Bed:
    async def run() -> _Bed:
        bed = _Bed(held_s)
        try:
            await scenario(bed)
        finally:
            await bed.locks.stop()
            await bed.locks.settle(0)
        assert bed.locks.in_flight == 0
        assert bed.locks.faults.count == 0
        return bed

    return asyncio.run(run())


async def _until(condition: Callable[[], object]) -> None:
    await eventually(condition, every=0.002)


async def _until_bound(bed: _Bed, count: int) -> None:
    await _until(lambda: len(bed.bound) == count)


# --- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lock"),
    [
        (lock_text("ns", "web", now_s=1e9), NodeLock(1e9, "ns", "web")),
        ("2001-09-09T01:46:40Z", NodeLock(1e9)),
        ("2001-09-09T03:46:40+02:00,ns,web-0.x", NodeLock(1e9, "ns", "web-0.x")),
        ("yesterday,ns,web", None),
        ("2001-09-09T01:46:40Z,ns", None),
        ("2001-09-09T01:46:40Z,ns,../../nodes/n1", None),
        ("", None),
        ("a,b,c,d", None),
    ],
)
def test_the_text_of_a_lock_names_time_and_pod(text: str, lock: NodeLock | None) -> None:
    assert parse_lock(text) == lock


# --- taking --------------------------------------------------------------------------------------


def test_a_free_lock_is_taken_before_the_pod_is_bound() -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("a")
        await _until(lambda: bed.bound)
        assert bed.bound == [placement]
        assert bed.annotations == {"kept": "1", KEY: "2023-11-14T22:13:20Z,default,a"}
        # The lock of a pod that is bound is removed by the plugin alone.
        bed.locks.ended(placement, Bound())
        await bed.locks.settle(1)
        assert bed.holder == "a"

    bed = _play(scenario)
    assert (bed.locks.counts.taken, bed.locks.counts.released) == (1, 0)


def test_pods_of_one_node_get_the_lock_one_after_the_other() -> None:
    async def scenario(bed: _Bed) -> None:
        for name in ("a", "b", "c"):
            bed.submit(name)
        for number, name in enumerate(("a", "b", "c"), start=1):
            await _until_bound(bed, number)
            assert (bed.names()[-1], bed.holder) == (name, name)
            await asyncio.sleep(0.02)
            assert len(bed.bound) == number
            bed.change({KEY: None})  # as the plugin does

    _play(scenario)


def test_a_change_of_the_node_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_LOOK_S", 3600.0)

    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other")})
        bed.pod("other")
        bed.submit("a")
        await asyncio.sleep(0.02)
        assert not bed.bound
        bed.change({KEY: None})
        bed.locks.node_event(Event(Change.MODIFIED, None, make_node("n1")))
        await _until(lambda: bed.bound)

    _play(scenario)


def test_a_lock_that_is_held_too_long_refuses_all_pods_that_wait_for_it() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other")})
        bed.pod("other", node="n1")
        bed.submit("a")
        bed.submit("b")
        await asyncio.sleep(0.02)
        assert not bed.refused
        bed.steady = 10.0
        await _until(lambda: len(bed.refused) == 2)
        # Nor does a pod that comes later wait for it once more.
        bed.submit("c")
        await _until(lambda: len(bed.refused) == 3)
        assert {refused.why for _, refused in bed.refused} == {Why.LOCKED}
        assert bed.refused[0][1].message == (
            f"lock {KEY} of node n1 (2023-11-14T22:13:20Z,default,other): held until pod "
            "default/other has its devices"
        )
        assert not bed.bound and not bed.patches
        bed.change({KEY: None})
        bed.submit("d")
        await _until(lambda: bed.bound)

    _play(scenario, held_s=10.0)


@pytest.mark.parametrize(
    ("pod", "age_s", "taken"),
    [
        ({}, 299, False),
        ({"node": "n1", "phase": "Running"}, 299, False),
        ({}, 301, True),
        ({"node": "n2"}, 0, True),
        ({"node": "n1", "phase": "Succeeded"}, 0, True),
        ({"node": "n1", "phase": "Failed"}, 0, True),
        (None, 0, True),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_lock_of_which_nothing_is_to_be_expected_is_taken_over(
    pod: dict[str, str] | None, age_s: float, taken: bool, late: bool
) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other", age_s=age_s)})
        if pod is not None:
            bed.pod("other", **pod)
        if late:
            # The cache has not seen the pod yet; the pod itself is read.
            bed.late.add("default/other")
        bed.submit("a")
        await _until(lambda: bed.bound or bed.refused)
        assert (bed.names() == ["a"]) is taken
        assert bed.locks.counts.taken_over == int(taken)
        assert bed.holder == ("a" if taken else "other")

    _play(scenario, held_s=0.0)


@pytest.mark.parametrize("text", ["no lock", f"{_text('x')},y", "2001-09-09T01:46:40Z"])
def test_texts_that_are_no_lock_or_an_old_one_do_not_count(text: str) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: text})
        bed.submit("a")
        await _until(lambda: bed.bound)

    _play(scenario)


def test_a_lock_without_a_pod_holds_until_its_time_is_over() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: "2023-11-14T22:13:00Z"})
        bed.submit("a")
        await _until(lambda: bed.refused)
        assert "held until a pod that it does not name" in bed.refused[0][1].message
        bed.clock += 300.0
        bed.submit("b")
        await _until(lambda: bed.bound)

    _play(scenario, held_s=0.0)


def test_a_lock_whose_time_lies_ahead_is_stale_when_it_has_been_seen_for_long() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other", age_s=-1e6)})
        bed.pod("other")
        bed.submit("a")
        await asyncio.sleep(0.02)
        assert not bed.bound
        bed.steady = 301.0
        await _until(lambda: bed.bound)

    _play(scenario)


def test_a_lock_of_the_same_pod_that_a_killed_scheduler_left_is_taken_with_the_present_time() -> (
    None
):
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("a", age_s=200)})
        bed.submit("a")
        await _until(lambda: bed.bound)
        assert bed.lock == _text("a")

    _play(scenario)


def test_a_pod_whose_lock_a_killed_scheduler_left_comes_before_those_that_wait_for_it() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("c", age_s=20)})
        for name in ("a", "b", "c"):
            bed.submit(name)
        for number in range(1, 4):
            await _until_bound(bed, number)
            bed.change({KEY: None})
        assert bed.names() == ["c", "a", "b"]

    _play(scenario)


def test_two_pods_that_stand_in_the_lock_of_each_other_wait_as_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "_LOOK_S", 3600.0)
    other = "vendor.example/lock"

    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("b"), other: _text("a")})
        placements = bed.pod("a"), replace(bed.pod("b"), lock=other)
        for placement in placements:
            bed.locks.submit(placement)
        for placement in placements:
            await _until(lambda: bed.asked)
            await asyncio.sleep(0.02)
            assert bed.asked == 1
            assert bed.refused == []
            bed.steady += 10.0
            bed.asked = 0
            bed.locks.node_event(Event(Change.MODIFIED, None, make_node("n1")))
            await _until(lambda: bed.refused)
            assert [(one, refused.why) for one, refused in bed.refused] == [(placement, Why.LOCKED)]
            bed.refused.clear()
            # What is left are the looks of the pod behind it.
            bed.asked -= 1

    bed = _play(scenario, held_s=10.0)
    assert not bed.patches


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [["before"], ["after"], [500], [409], [429], [503] * 5])
def test_an_answer_that_is_lost_is_resolved_by_reading(faults: list[str | int]) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend(faults)
        bed.submit("a")
        await _until(lambda: bed.bound)
        assert bed.holder == "a" and len(bed.bound) == 1

    _play(scenario)


@pytest.mark.parametrize(
    ("faults", "why"),
    [([503] * 6, Why.FAILING), ([403], Why.FORBIDDEN), ([422], Why.INVALID)],
)
def test_what_cannot_be_written_refuses_the_pod(faults: list[str | int], why: Why) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend(faults)
        bed.submit("a")
        await _until(lambda: bed.refused)
        assert bed.refused[0][1].why is why
        assert ("deploy/scheduler/node-locks" in bed.refused[0][1].message) is (403 in faults)
        bed.submit("b")
        await _until(lambda: bed.bound)

    _play(scenario)


def test_a_node_that_is_gone_refuses_the_pod() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.node_exists = False
        bed.submit("a")
        await _until(lambda: bed.refused)
        assert bed.refused[0][1].why is Why.CONFLICT

    _play(scenario)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_pod_that_is_deleted_or_made_again_does_not_wait(deleted: bool) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other")})
        bed.pod("other")
        placement = bed.pod("a")
        bed.locks.submit(placement if deleted else replace(placement, uid="earlier"))
        if deleted:
            await asyncio.sleep(0.01)
            del bed.pods["default/a"]
        await _until(lambda: bed.refused)
        assert bed.refused[0][1].why is Why.DELETED

    _play(scenario)


@pytest.mark.parametrize("place", ["first", "behind"])
@pytest.mark.parametrize("how", ["gone", "ending", "made again"])
def test_a_pod_that_is_deleted_is_given_up_while_others_wait_before_it(
    place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room of a pod that is being deleted is free only then, which a finalizer may put off."""
    monkeypatch.setattr(under_test, "_LOOK_S", 3600.0)

    async def scenario(bed: _Bed) -> None:
        bed.change({KEY: _text("other")})
        bed.pod("other")
        for name in ("first", "behind", "last"):
            bed.submit(name)
        await asyncio.sleep(0.02)
        key = f"default/{place}"
        pod = bed.pods[key]
        if how == "gone":
            del bed.pods[key]
        else:
            now = {"uid": "new"} if how == "made again" else {"deletion_timestamp": "now"}
            metadata = msgspec.structs.replace(pod.metadata, **now)
            bed.pods[key] = msgspec.structs.replace(pod, metadata=metadata)
        for other in ("other", "last", place):
            seen = bed.pods.get(f"default/{other}", pod)
            bed.locks.pod_event(Event(Change.MODIFIED, None, seen))
        await _until(lambda: bed.refused)
        assert [(each.name, why.why) for each, why in bed.refused] == [(place, Why.DELETED)]
        assert bed.locks.in_flight == 2
        bed.change({KEY: None})
        bed.locks.node_event(Event(Change.MODIFIED, None, make_node("n1")))
        await _until(lambda: bed.bound)
        assert bed.holder == ("behind" if place == "first" else "first")

    _play(scenario)


def test_a_defect_refuses_the_pod_and_not_those_behind_it() -> None:
    async def run() -> None:
        bed = _Bed(held_s=1e9)
        broken = bed.pod("broken")
        bed.pods["default/broken"] = cast(SchedulingPod, object())
        bed.locks.submit(broken)
        bed.submit("a")
        await _until(lambda: bed.bound and bed.refused)
        assert bed.refused[0][1].why is Why.FAILING
        assert bed.locks.faults.count == 1
        await bed.locks.stop()

    asyncio.run(run())


# --- releasing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [[], ["after"], [409, 503, "before"]])
def test_the_lock_of_a_pod_that_is_not_bound_is_removed(faults: list[str | int]) -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("a")
        await _until(lambda: bed.bound)
        bed.faults.extend(faults)
        bed.locks.ended(placement, Refused(Why.CONFLICT, "the test wants it"))
        bed.submit("b")
        await _until(lambda: len(bed.bound) == 2)
        assert bed.holder == "b"
        assert bed.annotations["kept"] == "1"

    _play(scenario)


def test_a_lock_that_another_pod_has_by_now_is_not_removed() -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("a")
        await _until(lambda: bed.bound)
        bed.change({KEY: _text("other")})
        bed.locks.ended(placement, Refused(Why.CONFLICT, "the test wants it"))
        await bed.locks.settle(1)
        assert bed.holder == "other"

    _play(scenario)


def test_a_lock_that_was_taken_by_a_write_without_an_answer_is_removed_when_the_pod_goes() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.append("after")
        bed.deletes = "default/a"
        bed.submit("a")
        await _until(lambda: bed.refused)
        await bed.locks.settle(1)
        assert bed.lock == ""

    _play(scenario)


def test_a_lock_of_a_binding_without_an_outcome_is_not_taken_over_by_a_pod_of_ours() -> None:
    async def scenario(bed: _Bed) -> None:
        first = bed.submit("a")
        await _until(lambda: bed.bound)
        bed.clock += 1000.0  # the API server was away
        bed.submit("b")
        await asyncio.sleep(0.02)
        assert bed.names() == ["a"]
        bed.locks.ended(first, Bound())
        await _until(lambda: len(bed.bound) == 2)

    _play(scenario)


def test_a_stop_leaves_the_lock_to_the_next_leader() -> None:
    async def scenario(bed: _Bed) -> None:
        bed.submit("a")
        await _until(lambda: bed.bound)
        bed.submit("b")
        bed.down = True
        await bed.locks.stop()
        assert bed.holder == "a"
        assert not bed.refused

    _play(scenario)


# --- every status code ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        # What the server did not take up is no failure, and an absence begins the count again.
        [429, 401] * 6,
        [*[503] * 5, "before", *[503] * 5],
        [409, 409],
        [408, 500],
    ],
)
def test_a_lock_is_taken_as_soon_as_the_server_takes_it(faults: list[str | int]) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend(faults)
        bed.submit("p")
        await _until_bound(bed, 1)
        assert (bed.holder, len(bed.patches)) == ("p", 1)
        assert bed.locks.counts == NodeLockCounts(taken=1)

    _play(scenario)


@pytest.mark.parametrize(
    ("status", "why", "text"),
    [
        (400, Why.INVALID, "the test wants it"),
        (422, Why.INVALID, "the test wants it"),
        (403, Why.FORBIDDEN, "the test wants it; the right is in deploy/scheduler/node-locks"),
        (404, Why.CONFLICT, "the test wants it"),
        (500, Why.FAILING, "a test: 500 Fault: the test wants it"),
        (409, Why.FAILING, "a test: 409 Fault: the test wants it"),
    ],
)
def test_a_server_that_refuses_the_lock_gives_the_node_back(
    status: int, why: Why, text: str
) -> None:
    async def scenario(bed: _Bed) -> None:
        bed.faults.extend([status] * 6)
        placement = bed.submit("p")
        await _until(lambda: bed.refused)
        assert bed.refused == [(placement, Refused(why, f"lock {KEY} of node n1: {text}"))]
        assert bed.bound == []
        assert bed.locks.counts.refused == 1

    _play(scenario)


_LOST = Refused(Why.FAILING, "no")


@pytest.mark.parametrize("faults", [[503, 409, 429], ["before"], ["after"]])
def test_the_lock_of_a_pod_that_is_not_bound_is_removed_however_often_that_fails(
    faults: list[str | int],
) -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("p")
        await _until_bound(bed, 1)
        bed.faults.extend(faults)
        bed.locks.ended(placement, _LOST)
        await _until(lambda: not bed.lock and not bed.locks._releases)
        assert bed.patches[-1] == {KEY: None}
        # Removed already when an answer is lost.
        assert bed.locks.counts.released == (0 if "after" in faults else 1)

    _play(scenario)


@pytest.mark.parametrize("status", [400, 403, 422])
def test_a_lock_that_must_not_be_removed_is_named_and_left(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("p")
        await _until_bound(bed, 1)
        bed.faults.append(status)
        bed.locks.ended(placement, _LOST)
        await _until(lambda: not bed.locks._releases)
        assert (bed.holder, bed.locks.counts.released) == ("p", 0)

    _play(scenario)
    assert f"lock {KEY} of node n1: not removed for pod default/p: " in caplog.text


def test_the_lock_of_a_node_that_is_gone_needs_no_removal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(bed: _Bed) -> None:
        placement = bed.submit("p")
        await _until_bound(bed, 1)
        bed.node_exists = False
        bed.locks.ended(placement, _LOST)
        await _until(lambda: not bed.locks._releases)

    _play(scenario)
    assert "not removed" not in caplog.text


def test_defects_are_outcomes_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        bed = _Bed(1e9)

        def refused(placement: Placement, refused: Refused) -> None:
            bed.refused.append((placement, refused))
            raise ValueError("a defect in taking it")

        def broken(placement: Placement, text: str) -> None:
            raise ValueError("a defect")

        monkeypatch.setattr(bed.locks, "_refuse", refused)
        monkeypatch.setattr(bed.locks, "_holder", broken)
        placement = bed.submit("p")
        await _until(lambda: not bed.locks.in_flight)
        text = f"lock {KEY} of node n1: ValueError: a defect"
        assert bed.refused == [(placement, Refused(Why.FAILING, text))]
        assert bed.locks.faults.count == 2

    asyncio.run(run())
