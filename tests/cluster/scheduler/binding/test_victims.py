"""Victims of a preemption are deleted with a reason, and never a pod that came after them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import pytest

from cluster.scheduler.binding import pauses
from cluster.scheduler.binding.evictor import Evictor
from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.victims import Victim, evict_victim
from tests.beds.apiserver import eventually
from tests.cluster.scheduler.binding.stored_pods import (
    After,
    Fault,
    StoredPods,
    cut,
    refuse,
    serving,
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pauses, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_S", 0.01)
    yield


def evicted(store: StoredPods, uid: str = "u") -> Refused | None:
    async def run() -> Refused | None:
        async with serving(store) as client:
            return await evict_victim(
                client, Victim("ns", "p", uid), controller="c", now=lambda: 0.0
            )

    return asyncio.run(run())


def one_pod(*faults: Fault | After | None, uid: str = "u") -> StoredPods:
    store = StoredPods(faults=deque(faults))
    store.add("p", uid)
    return store


@pytest.mark.parametrize(
    ("faults", "writes"),
    [
        ([], ["PATCH status", "DELETE p"]),
        ([cut], ["PATCH status", "PATCH status", "DELETE p"]),
        ([None, After(cut)], ["PATCH status", "DELETE p", "PATCH status"]),
        ([None, refuse(500, "X")], ["PATCH status", "DELETE p"] * 2),
        *(
            ([refuse(code, "X")], ["PATCH status", "PATCH status", "DELETE p"])
            for code in (401, 408, 409, 429)
        ),
    ],
)
def test_a_victim_is_marked_and_deleted_whatever_is_lost(
    faults: list[Fault | After | None], writes: list[str]
) -> None:
    store = one_pod(*faults)
    assert evicted(store) is None
    assert store.writes == writes
    assert store.pods == {}
    patch = store.requests[0][2]
    assert patch["metadata"] == {"uid": "u"}
    assert patch["status"]["conditions"] == [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "c: preempting to accommodate a higher priority pod",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }
    ]


def test_a_pod_of_the_same_name_that_came_later_is_spared() -> None:
    store = one_pod(uid="later")
    assert evicted(store) is None
    assert "p" in store.pods

    def replaced(_: object) -> None:
        store.add("p", "later")

    store = one_pod(After(replaced), uid="u")
    assert evicted(store) is None
    assert "p" in store.pods


@pytest.mark.parametrize(
    ("fault", "why", "writes"),
    [
        (refuse(403, "Forbidden", "no"), Why.FORBIDDEN, 1),
        (refuse(422, "Invalid", "no"), Why.INVALID, 1),
        (refuse(500, "InternalError", "no"), Why.FAILING, 6),
        (refuse(409, "Conflict", "no"), Why.FAILING, 6),
    ],
)
def test_a_refusal_has_a_reason(fault: Fault, why: Why, writes: int) -> None:
    store = one_pod()
    store.always = fault
    found = evicted(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert len(store.writes) == writes


def test_evictions_run_in_the_background_and_each_has_one_outcome() -> None:
    store = StoredPods(faults=deque([refuse(403, "Forbidden")]))
    store.add("p", "u")
    store.add("q", "v")
    outcomes: list[tuple[str, Refused | None]] = []

    async def run() -> None:
        async with serving(store) as client:
            evictor = Evictor(
                client, lambda victim, why: outcomes.append((victim.uid, why)), now=lambda: 0.0
            )
            for uid in ("u", "gone", "v"):
                name = {"u": "p", "v": "q"}.get(uid, "nobody")
                evictor.submit(Victim("ns", name, uid), "c")
            await eventually(lambda: not evictor.in_flight)

    asyncio.run(run())
    found = dict(outcomes)
    assert len(outcomes) == 3
    assert found["gone"] is None
    refused = [why for why in found.values() if why is not None]
    assert [why.why for why in refused] == [Why.FORBIDDEN]


def test_a_defect_in_an_eviction_is_an_outcome_and_counted() -> None:
    outcomes: list[tuple[Victim, Refused | None]] = []

    def now() -> float:
        raise ValueError("no clock")

    async def run() -> None:
        async with serving(one_pod()) as client:
            evictor = Evictor(client, lambda *both: outcomes.append(both), now=now)
            evictor.submit(Victim("ns", "p", "u"), "c")
            assert evictor.in_flight == 1
            await eventually(lambda: outcomes)
            assert evictor.faults.count == 1

    asyncio.run(run())
    assert outcomes == [
        (Victim("ns", "p", "u"), Refused(Why.FAILING, "ValueError: no clock"))
    ]  # fmt: skip


def test_a_stop_gives_up_evictions_that_wait_for_the_server() -> None:
    store = one_pod(*[cut] * 10_000)
    outcomes: list[Victim] = []

    async def run() -> None:
        async with serving(store) as client:
            evictor = Evictor(client, lambda victim, why: outcomes.append(victim), now=lambda: 0.0)
            evictor.submit(Victim("ns", "p", "u"), "c")
            await eventually(lambda: store.writes)
            await evictor.stop()
            assert not evictor.in_flight

    asyncio.run(run())
    assert outcomes == []
