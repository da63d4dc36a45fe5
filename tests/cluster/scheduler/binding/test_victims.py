"""Victims of a preemption are deleted with a reason, and never a pod that came after them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

import pytest

from cluster.scheduler.binding import victims as victims_module
from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.victims import Victim, evict_victim
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
    monkeypatch.setattr(victims_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(victims_module, "_LONGEST_PAUSE_S", 0.01)
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
        ([refuse(429, "X")], ["PATCH status", "PATCH status", "DELETE p"]),
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
    ],
)
def test_a_refusal_has_a_reason(fault: Fault, why: Why, writes: int) -> None:
    store = one_pod()
    store.always = fault
    found = evicted(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert len(store.writes) == writes
